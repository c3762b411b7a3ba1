#include "binding/operator_guard.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <Python.h>

#include <ATen/record_function.h>
#include <c10/core/impl/COW.h>
#include <torch/csrc/autograd/graph_task.h>

#include "allocator/current_stream.h"
#include "allocator/pager_registry.h"
#include "allocator/sim_allocator.h"
#include "allocator/torch_compat.h"
#include "binding/collective_pins.h"
#include "binding/deferred_updates.h"
#include "binding/foreign_kernels.h"
#include "binding/managed_storages.h"
#include "binding/operator_traits.h"
#include "binding/thread_roster.h"

namespace trainstream::operator_guard {

namespace {

// Boundaries of a thread from one look at collectives under way to the next.
constexpr uint64_t kBoundariesEachLook = 16;

struct PagerUses {
    Pager* pager = nullptr;
    std::vector<Use> uses;
};

/// A pointer that was handed out: pinned until this thread has passed so many boundaries.
struct BriefPin {
    PagerPins held;
    uint64_t until_boundary = 0;
};

/// What one thread is in the middle of.
///
/// Everything an outermost operator, and those it calls, has named stays pinned until the outermost
/// one ends: a kernel keeps bare pointers across the operators that it calls for itself.
///
/// Owner: its thread. Lock: none.
struct ThreadState {
    int depth = 0;
    // Our own operators run in the middle of another's announcement: see Aside.
    bool aside = false;
    // Where an operator that leaves_raw began; 0: in none. What it makes, and may fill through
    // other operators, keeps its place by having no known owner, until a later operator names it.
    int raw_depth = 0;
    ThreadRoster::Line line;
    std::vector<PagerPins> pins;
    std::vector<BriefPin> brief;
    std::vector<std::pair<int, CollectivePins::Helds>> collectives;  // By the depth they began at.
    std::vector<uint64_t> begun;  // Collectives, within this outermost operator.
    // Without Python: C++ may hand what its operators make to a library by its address, as gloo's
    // threads do. So that stays for as long as it lives.
    const bool is_foreign = PyGILState_GetThisThreadState() == nullptr && !in_backward();
    std::vector<std::pair<Pager*, uint64_t>> newest;  // Serials, as its outermost operator began.
    std::vector<PagerUses> uses;                      // Scratch, kept for its memory.

    ThreadState() {
        // Autograd's threads run nothing outside of a backward pass, so not their first operator
        // either.
        line.is_autograds.store(in_backward(), std::memory_order_relaxed);
        ThreadRoster::instance().join(&line);
    }
    ~ThreadState() {
        if (PagerRegistry::instance().forked()) {
            return;  // The locks are as other threads of the parent left them.
        }
        ThreadRoster::instance().leave(&line);
        for (PagerPins& held : pins) {
            held.pager->end_use(&held.pins);
        }
        for (BriefPin& pin : brief) {
            pin.held.pager->end_use(&pin.held.pins);
        }
        for (auto& [began_at, helds] : collectives) {
            for (CollectivePins::Held& held : helds) {
                held.given.pager->end_use(&held.given.pins);
            }
        }
    }

    static bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

    /// This thread is about to use a device: it counts as one that may at any time.
    void note_device() {
        if (line.is_autograds.load(std::memory_order_relaxed) && !in_backward()) {
            line.is_autograds.store(false, std::memory_order_relaxed);
        }
        line.uses_device.store(true, std::memory_order_relaxed);
    }

    bool keeps_what_it_makes() const {
        return is_foreign && !line.is_ours.load(std::memory_order_relaxed);
    }

    void outermost_began() {
        newest.clear();
        if (keeps_what_it_makes()) {
            PagerRegistry::instance().for_each(
                [&](Pager& pager) { newest.emplace_back(&pager, pager.newest_serial()); });
        }
    }

    /// What this thread makes after the storage with that serial stays.
    uint64_t for_good_after(const Pager* pager) const {
        for (const auto& [each, serial] : newest) {
            if (each == pager) {
                return serial;
            }
        }
        return UINT64_MAX;
    }

    /// What the operator that is beginning now gives to others.
    CollectivePins::Held& hold_for_collective(Pager* pager) {
        if (collectives.empty() || collectives.back().first != depth) {
            collectives.emplace_back(depth, CollectivePins::Helds());
        }
        CollectivePins::Helds& helds = collectives.back().second;
        helds.push_back({{pager, {}}, pager->newest_serial()});
        return helds.back();
    }

    Pins* pins_of(Pager* pager) {
        for (PagerPins& held : pins) {
            if (held.pager == pager) {
                return &held.pins;
            }
        }
        pins.push_back({pager, {}});
        return &pins.back().pins;
    }

    std::vector<Use>& uses_of(Pager* pager) {
        for (PagerUses& group : uses) {
            if (group.pager == pager) {
                return group.uses;
            }
        }
        uses.push_back({pager, {}});
        return uses.back().uses;
    }
};

ThreadState& thread_state() {
    thread_local ThreadState state;
    return state;
}

/// Marks what uses no bytes of its own: a range that is no operator, since what it runs announces
/// itself, or an operator that only makes views, which are 2 of 5 in a transformer's step. It
/// neither nests nor pins, and is no boundary.
struct NotAnOperator final : at::ObserverContext {};

/// A Python function, which may hand its arguments to kernels that nobody announces until it ends.
/// Likewise no operator.
struct PythonFunction final : at::ObserverContext {
    PythonFunction() = default;
    ~PythonFunction() override {
        if (PagerRegistry::instance().forked()) {
            return;  // The locks are as other threads of the parent left them.
        }
        for (const auto& [pager, storages] : arguments) {
            pager->end_unseen(storages);
        }
    }
    PythonFunction(const PythonFunction&) = delete;
    PythonFunction& operator=(const PythonFunction&) = delete;

    /// It may make tensors on a device of which it was given none.
    void begin_where_it_has_none() {
        PagerRegistry::instance().for_each([this](Pager& pager) {
            const auto is_its = [&](const auto& each) { return each.first == &pager; };
            if (std::none_of(arguments.begin(), arguments.end(), is_its)) {
                const CurrentStream stream(pager);
                arguments.emplace_back(&pager, pager.begin_unseen({}, stream.id()));
            }
        });
    }

    std::vector<std::pair<Pager*, std::vector<StoragePtr>>> arguments;
};

/// Whether it has a tensor on a GPU, however small: its kernel may use a library's workspace there.
bool names_gpu(const at::RecordFunction& function) {
    const auto inputs = function.inputs();
    return std::any_of(inputs.begin(), inputs.end(), [](const c10::IValue& value) {
        return value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda();
    });
}

/// Optimizers' updates that wait are made before anyone uses what they touch.
void make_updates_for(const at::RecordFunction& function) {
    DeferredUpdates& updates = DeferredUpdates::instance();
    if (!updates.any()) {
        return;
    }
    for (const c10::IValue& input : function.inputs()) {
        for_any_value(input, [&](const c10::StorageImpl* storage) { updates.make_for(storage); });
    }
}

/// `python`: where arguments are noted; null for an operator.
void announce(const at::RecordFunction& function, const OperatorTraits* traits, ThreadState& state,
              PythonFunction* python) {
    make_updates_for(function);
    for (PagerUses& group : state.uses) {
        group.uses.clear();
    }
    bool any = false;
    const auto inputs = function.inputs();
    for (size_t i = 0; i < inputs.size(); ++i) {
        // A Python function may hand its arguments to code that torch does not see: it may write.
        const bool writes = traits == nullptr || traits->writes_argument(i);
        const UseKind kind = traits == nullptr ? UseKind::kMetadata : traits->kind;
        for_value(inputs[i], [&](Pager& pager, c10::StorageImpl* storage) {
            const bool unseen = traits == nullptr;
            state.uses_of(&pager).push_back({storage, writes, kind, unseen});
            any = true;
        });
    }
    if (!any) {
        if (!state.line.uses_device.load(std::memory_order_relaxed) && names_gpu(function)) {
            state.note_device();
        }
        return;
    }
    state.note_device();
    for (PagerUses& group : state.uses) {
        if (group.uses.empty()) {
            continue;
        }
        const CurrentStream stream(*group.pager);
        if (PagerRegistry::instance().pools_open()) {
            group.pager->set_capturing(group.pager->device().is_capturing(stream.id()));
        }
        if (python != nullptr) {
            Pins passing;
            group.pager->begin_use(group.uses, stream.id(), &passing);
            python->arguments.emplace_back(group.pager,
                                           group.pager->begin_unseen(passing, stream.id()));
            group.pager->end_use(&passing);
        } else {
            group.pager->begin_use(group.uses, stream.id(), state.pins_of(group.pager));
        }
        if (traits != nullptr && traits->is_collective) {
            CollectivePins::Held& held = state.hold_for_collective(group.pager);
            group.pager->hold(group.uses, stream.id(), &held.given.pins);
        } else if (traits != nullptr && traits->keeps_address) {
            for (const Use& use : group.uses) {
                group.pager->pin_for_good(use.owner, stream.id());
            }
        }
    }
}

/// Makes the owners of what was returned known, so that it can move before it is ever an input.
void announce_outputs(const at::RecordFunction& function, ThreadState& state) {
    std::vector<std::pair<Pager*, std::vector<void*>>> groups;
    for (const c10::IValue& output : function.outputs()) {
        for_value(output, [&](Pager& pager, c10::StorageImpl* storage) {
            if (groups.empty() || groups.back().first != &pager) {
                groups.push_back({&pager, {}});
            }
            groups.back().second.push_back(storage);
        });
    }
    for (auto& [pager, owners] : groups) {
        const CurrentStream stream(*pager);
        // Inside another operator the caller may go on with a bare pointer to it.
        pager->note_outputs(owners, stream.id(), state.depth > 0 ? state.pins_of(pager) : nullptr,
                            state.for_good_after(pager));
    }
}

void pass_boundary(ThreadState& state) {
    if (!state.begun.empty()) {
        CollectivePins::instance().keep_made(state.begun, &state.pins);
        state.begun.clear();
    }
    for (PagerPins& held : state.pins) {
        held.pager->end_use(&held.pins);
        held.pager->boundary();
    }
    if (state.aside) {
        return;  // A pointer that was handed out is still to be used.
    }
    const uint64_t boundaries = state.line.boundaries.fetch_add(1) + 1;
    while (!state.brief.empty() && state.brief.front().until_boundary <= boundaries) {
        PagerPins& held = state.brief.front().held;
        held.pager->end_use(&held.pins);
        state.brief.erase(state.brief.begin());
    }
    if (boundaries % kBoundariesEachLook == 0 && CollectivePins::instance().any() &&
        !PagerRegistry::instance().pools_open()) {
        CollectivePins::instance().release_done();
    }
}

/// In a forked child nothing moves. What was on its way to a place that a storage already points to
/// comes there before anybody looks: a simulated device's copies, as no child can use CUDA.
bool is_child() {
    if (!PagerRegistry::instance().forked()) {
        return false;
    }
    if (SimAllocator* sim = sim_allocator()) {
        sim->device().finish_if_forked();
    }
    return true;
}

/// What it runs of the user's may hand tensors to a kernel that nobody announces, where one is.
bool only_operators(const at::RecordFunction& function) {
    return is_known_without_schema(function) ||
           (runs_operators(function) && !foreign_kernels_loaded());
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
    if (is_child()) {
        return nullptr;
    }
    if (function.scope() == at::RecordScope::TORCHSCRIPT_FUNCTION) {
        // Its fused kernels take what they use by its address.
        DeferredUpdates::instance().make_all();
        PagerRegistry::instance().for_each(
            [](Pager& pager) { pager.note_unseen(CurrentStream(pager).id()); });
        return std::make_unique<NotAnOperator>();
    }
    ThreadState& state = thread_state();
    const OperatorTraits* traits = traits_of(function);
    if (traits == nullptr && only_operators(function)) {
        return std::make_unique<NotAnOperator>();
    }
    if (traits == nullptr) {
        auto python = std::make_unique<PythonFunction>();
        announce(function, traits, state, python.get());
        python->begin_where_it_has_none();
        return python;
    }
    if (traits->only_views) {
        return std::make_unique<NotAnOperator>();
    }
    if (++state.depth == 1) {  // Before anything can throw: on_end takes it back.
        state.outermost_began();
    }
    if (state.raw_depth != 0) {
        make_updates_for(function);  // A subclass's or a mode's handler runs what it likes.
        return nullptr;
    }
    state.raw_depth = traits->leaves_raw ? state.depth : 0;
    announce(function, traits, state, nullptr);
    return nullptr;
}

void on_end(const at::RecordFunction& function, at::ObserverContext* context) {
    if (PagerRegistry::instance().forked() || context != nullptr) {
        return;
    }
    ThreadState& state = thread_state();
    if (state.depth == 0) {
        return;  // It began before the fork of this process.
    }
    if (!state.collectives.empty() && state.collectives.back().first == state.depth) {
        CollectivePins::Helds helds = std::move(state.collectives.back().second);
        state.collectives.pop_back();
        state.begun.push_back(CollectivePins::instance().add(function.outputs(), std::move(helds)));
    }
    const bool makes_raw = state.raw_depth != 0;
    if (state.raw_depth == state.depth) {
        state.raw_depth = 0;
    }
    --state.depth;
    if (!makes_raw) {
        announce_outputs(function, state);
    }
    if (state.depth == 0) {
        pass_boundary(state);
    }
}

std::mutex g_watch_mutex;  // A leaf: torch's own callback list is all that is called under it.
int g_watchers = 0;
at::CallbackHandle g_callback = at::INVALID_CALLBACK_HANDLE;
std::atomic<bool> g_watching{false};

}  // namespace

void watch(bool on) {
    if (!on) {
        DeferredUpdates::instance().make_all();  // Nobody would, once uses are not announced.
    }
    std::lock_guard<std::mutex> lock(g_watch_mutex);
    g_watchers += on ? 1 : -1;
    if (g_watchers > 0 && g_callback == at::INVALID_CALLBACK_HANDLE) {
        ThreadRoster::instance().start();
        g_callback = at::addGlobalCallback(
            at::RecordFunctionCallback(on_start, on_end)
                .needsInputs(true)
                .needsOutputs(true)
                .scopes({at::RecordScope::FUNCTION, at::RecordScope::TORCHSCRIPT_FUNCTION}));
    } else if (g_watchers <= 0 && g_callback != at::INVALID_CALLBACK_HANDLE) {
        at::removeCallback(g_callback);
        g_callback = at::INVALID_CALLBACK_HANDLE;
    }
    g_watching.store(g_callback != at::INVALID_CALLBACK_HANDLE);
}

bool is_watching() { return g_watching.load(); }

bool all_announced() { return ThreadRoster::instance().all_announced(); }

void make_pending_writes() {
    Pager::make_pending_writes();
    thread_state().line.is_ours.store(true, std::memory_order_relaxed);
}

struct Aside::Saved {
    int depth;
    int raw_depth;
    bool aside;
    std::vector<uint64_t> begun;
    std::vector<PagerPins> pins;
};

Aside::Aside() {
    ThreadState& state = thread_state();
    saved_ = std::make_unique<Saved>(Saved{state.depth, state.raw_depth, state.aside,
                                           std::move(state.begun), std::move(state.pins)});
    state.depth = 0;
    state.raw_depth = 0;
    state.aside = true;
    state.begun.clear();
    state.pins.clear();
}

Aside::~Aside() {
    ThreadState& state = thread_state();
    state.depth = saved_->depth;
    state.raw_depth = saved_->raw_depth;
    state.aside = saved_->aside;
    state.begun = std::move(saved_->begun);
    state.pins = std::move(saved_->pins);
}

size_t user_threads() { return ThreadRoster::instance().user_threads(); }

namespace {

void pin_storage_briefly(Pager& pager, c10::StorageImpl* storage) {
    if (!is_watching()) {
        return;  // Nothing moves, and no boundary would ever take the pin back.
    }
    ThreadState& state = thread_state();
    BriefPin pin{{&pager, {}}, state.line.boundaries.load() + 2};
    const CurrentStream stream(pager);
    pager.begin_use({{storage, /*writes=*/true, UseKind::kBringIn}}, stream.id(), &pin.held.pins);
    state.brief.push_back(std::move(pin));
}

void pin_storage_for_good(Pager& pager, c10::StorageImpl* storage) {
    const CurrentStream stream(pager);
    pager.pin_for_good(storage, stream.id());
}

/// A forked child moves nothing, so addresses stay right without a pin.
bool may_pin() { return !is_child(); }

/// Handing out the address of a lazy clone makes it a storage of its own; better before the pin.
void end_lazy_clone(c10::StorageImpl* storage) {
    if (PagerRegistry::instance().find(storage->device()) != nullptr &&
        c10::impl::cow::is_cow_data_ptr(compat::raw_data_ptr(*storage))) {
        storage->mutable_data();  // Newer torch has no other way to say it.
    }
}

void end_lazy_clone(const at::Tensor& tensor) {
    if (tensor.defined() && tensor.unsafeGetTensorImpl()->has_storage()) {
        end_lazy_clone(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    }
}

void make_updates_for(const at::Tensor& tensor) {
    for_any_tensor(tensor, [](const c10::StorageImpl* storage) {
        DeferredUpdates::instance().make_for(storage);
    });
}

}  // namespace

void pin_briefly(const at::Tensor& tensor) {
    if (may_pin()) {
        make_updates_for(tensor);
        end_lazy_clone(tensor);
        for_tensor(tensor, &pin_storage_briefly);
    }
}

void pin_for_good(const at::Tensor& tensor) {
    if (may_pin()) {
        make_updates_for(tensor);
        end_lazy_clone(tensor);
        for_tensor(tensor, &pin_storage_for_good);
    }
}

void pin_storage(const c10::Storage& storage, bool for_good) {
    if (may_pin()) {
        DeferredUpdates::instance().make_for(storage.unsafeGetStorageImpl());
        end_lazy_clone(storage.unsafeGetStorageImpl());
        for_storage(storage.unsafeGetStorageImpl(),
                    for_good ? &pin_storage_for_good : &pin_storage_briefly);
    }
}

}  // namespace trainstream::operator_guard
