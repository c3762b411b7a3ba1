// csrc/binding/operator_traits.h: how an operator uses its arguments: what it writes, and whether
// cold bytes are worth bringing in.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include "pager/storage.h"

namespace trainstream {

struct OperatorTraits {
    std::string name;
    std::string overload;
    UseKind kind = UseKind::kBringInIfRoom;
    bool writes_all = false;     // Its schema cannot be trusted to say what it writes.
    std::vector<bool> writes;    // Of each argument.
    bool only_views = false;     // Touches no byte.
    bool leaves_raw = false;     // Makes memory for its caller to fill by its address.
    bool keeps_address = false;  // Uses its arguments' memory after it has ended.

    bool writes_argument(size_t i) const { return writes_all || (i < writes.size() && writes[i]); }
};

OperatorTraits traits_of_schema(const c10::FunctionSchema& schema);

/// The traits of the operator that `function` announces; null when it announces no operator but a
/// Python function or a named range. Cached for each thread.
const OperatorTraits* traits_of(const at::RecordFunction& function);

/// Whether it announces one of torch's own functions that have no schema and touch no byte: detach,
/// which autograd calls on every weight that it saves.
bool is_view_without_schema(const at::RecordFunction& function);

}  // namespace trainstream
