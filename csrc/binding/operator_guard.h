// csrc/binding/operator_guard.h: tells the pagers what each operator uses, through RecordFunction.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "pager/pager.h"

namespace trainstream::operator_guard {

/// Counts those who want uses announced; the callback is registered while there is one.
void watch(bool on);
bool is_watching();
/// Whether every operator that began before uses were announced has ended.
bool all_announced();
/// The calling thread is our own, for pending writes: see Pager. It is no user's.
void make_pending_writes();
/// While it lives, what this thread runs is no part of what it was in the middle of: operators are
/// outermost ones, pins of those around them stay, and pointers handed out are not yet used.
///
/// Owner: the thread that made it. Lock: none.
class Aside {
public:
    Aside();
    ~Aside();
    Aside(const Aside&) = delete;
    Aside& operator=(const Aside&) = delete;

private:
    struct Saved;
    std::unique_ptr<Saved> saved_;
};

/// Threads that have run operators on a managed device since they exist, less our own and
/// autograd's, which work only while another one waits.
size_t user_threads();

/// A use outside any operator, of a pointer handed out: `tensor`'s managed storages are brought in
/// and count as written. Briefly: until this thread's next-but-one operator boundary. For good:
/// while the storage lives.
void pin_briefly(const at::Tensor& tensor);
void pin_for_good(const at::Tensor& tensor);
void pin_storage(const c10::Storage& storage, bool for_good);

}  // namespace trainstream::operator_guard
