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
    bool is_collective = false;  // Likewise, until the Work that it returns is done.

    bool writes_argument(size_t i) const { return writes_all || (i < writes.size() && writes[i]); }
};

OperatorTraits traits_of_schema(const c10::FunctionSchema& schema);

/// The traits of the operator that `function` announces; null when it announces no operator but a
/// Python function or a named range. Cached for each thread.
const OperatorTraits* traits_of(const at::RecordFunction& function);

/// Whether it announces one of torch's own functions that have no schema and either touch no byte
/// (detach, which autograd calls on every weight that it saves, and what a checkpoint saves by) or
/// are made of operators, which announce themselves (those of data parallel's gradients).
bool is_known_without_schema(const at::RecordFunction& function);

/// Whether what it announces is operators and code of the user's outside of any function of theirs:
/// the backward pass of one of torch's own operators with the hooks of its tensors, or a checkpoint
/// of the reentrant kind. Autograd names the former after the operator, with a number at the end;
/// a Python function's ends in "Backward".
bool runs_operators(const at::RecordFunction& function);

}  // namespace trainstream
