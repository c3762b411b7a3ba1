// csrc/binding/module.cpp: the Python edge: trainstream._C.
#include <algorithm>
#include <map>

#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include "allocator/current_stream.h"
#include "allocator/host_memory.h"
#include "allocator/limits.h"
#include "allocator/pager_registry.h"
#include "allocator/sim_allocator.h"
#include "allocator/storage_owner.h"
#include "binding/deferred_module.h"
#include "binding/deferred_updates.h"
#include "binding/foreign_kernels.h"
#include "binding/hardware_module.h"
#include "binding/managed_storages.h"
#include "binding/operator_guard.h"
#include "binding/optim_module.h"
#include "binding/planner_module.h"
#include "binding/saved_tensors.h"
#include "binding/unseen_step.h"
#include "binding/use_scope.h"

#ifdef TS_WITH_CUDA
#include "binding/cuda_module.h"
#endif

namespace trainstream {

namespace py = pybind11;

namespace {

/// A thread that holds the GIL may have to wait for one that needs it.
void* begin_blocking() { return PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr; }

void end_blocking(void* token) {
    if (token != nullptr) {
        PyEval_RestoreThread(static_cast<PyThreadState*>(token));
    }
}

void make_updates() { DeferredUpdates::instance().make_all(); }

bool all_kernels_known() { return !foreign_kernels_loaded(); }

void install_hooks() {
    StorageOwnerPort::instance().set_hooks({&begin_blocking, &end_blocking, &operator_guard::watch,
                                            &operator_guard::all_announced, &all_kernels_known,
                                            &operator_guard::user_threads, &make_updates});
}

void start_sim(uint64_t vram_bytes, int64_t ram_bytes, size_t min_storage_bytes, bool plan,
               bool verify, uint64_t seed) {
    ManagedOptions options;
    options.vram_bytes = vram_bytes;
    options.ram_bytes = host_limit_bytes(ram_bytes);
    options.min_storage_bytes = min_storage_bytes;
    options.pager = {.verify = verify, .plan = plan};
    options.seed = seed;
    start_sim_allocator(options);
    operator_guard::watch(true);
}

void sim_faults(uint64_t fail_copy_one_in, uint64_t page_lock_limit_bytes) {
    SimAllocator* allocator = sim_allocator();
    if (allocator == nullptr) {
        throw errors::invalid_argument("sim_faults: the simulated device does not run.");
    }
    allocator->device().set_faults({fail_copy_one_in, page_lock_limit_bytes});
}

py::dict dict_of(const char* device, const PagerStats& stats, const HostPoolStats& host,
                 const CopyStats& copies) {
    py::dict result;
    result["device"] = device;
    result["budget_bytes"] = stats.budget_bytes;
    result["peak_bytes"] = stats.peak_bytes;
    result["resident_bytes"] = stats.resident_bytes;
    result["cold_bytes"] = stats.cold_bytes;
    result["evicted_bytes"] = stats.evicted_bytes;
    result["restored_bytes"] = stats.restored_bytes;
    result["dropped_bytes"] = stats.dropped_bytes;
    result["spilled_bytes"] = stats.spilled_bytes;
    result["returned_bytes"] = stats.returned_bytes;
    result["in_place_bytes"] = stats.in_place_bytes;
    result["born_cold_bytes"] = stats.born_cold_bytes;
    result["evictions"] = stats.evictions;
    result["restores"] = stats.restores;
    result["failures"] = stats.failures;
    result["verify_faults"] = stats.verify_faults;
    result["pins"] = stats.pinned_storages;
    result["rebuilds"] = stats.rebuilds;
    result["steps"] = stats.steps;
    result["arena_bytes"] = stats.arena_bytes;
    result["extra_bytes"] = stats.extra_bytes;
    result["resident_peak_bytes"] = stats.resident_peak_bytes;
    result["beside_bytes"] = stats.beside_bytes;
    result["planned_bytes"] = stats.planned_bytes;
    result["plans"] = stats.plans;
    result["loaded_ahead_bytes"] = stats.loaded_ahead_bytes;
    result["demanded_bytes"] = stats.demanded_bytes;
    result["extra_opened"] = stats.extra_opened;
    result["extra_gave_way"] = stats.extra_gave_way;
    result["strays"] = stats.strays;
    result["host_in_use_bytes"] = host.in_use_bytes;
    result["host_in_use_bytes_peak"] = host.in_use_bytes_peak;
    result["host_limit_bytes"] = host.limit_bytes;
    result["page_locked_bytes"] = host.locked_bytes;
    result["page_locked_bytes_peak"] = host.locked_bytes;
    result["pageable_bytes"] = host.pageable_bytes;
    result["growths"] = host.growths;
    result["page_locks"] = host.locks;
    result["lock_ns"] = host.lock_ns;
    result["refusals"] = stats.refusals;
    result["copy_ns"] = copies.busy_ns;
    result["stall_ns"] = stats.stall_ns;
    result["watching"] = operator_guard::is_watching();
    return result;
}

py::dict stats_of(Pager& pager) {
    return dict_of(pager.device().name(), pager.stats(), pager.host().stats(),
                   pager.device().copy_stats());
}

/// In a forked child nothing moves, and the parent's threads may have left any lock closed.
template <typename Function>
void for_each_pager(const Function& function) {
    if (!PagerRegistry::instance().forked()) {
        PagerRegistry::instance().for_each(function);
    }
}

py::dict add_up() {
    py::dict total;
    for_each_pager([&](Pager& pager) {
        for (const auto& [key, value] : stats_of(pager)) {
            const bool number =
                py::isinstance<py::int_>(value) && !py::isinstance<py::bool_>(value);
            if (number && total.contains(key)) {
                total[key] = total[key].cast<uint64_t>() + value.cast<uint64_t>();
            } else {
                total[key] = value;
            }
        }
    });
    if (total.empty() && !PagerRegistry::instance().forked()) {
        // No storage yet. Only CUDA's pagers are made with the first one.
        return dict_of("cuda", {}, {}, {});
    }
    return total;
}

/// The numbers of all devices added up; empty in a forked child.
py::dict stats() {
    py::dict total = add_up();
    if (!total.empty()) {
        total["optimizer_bytes"] = host_zeros_bytes();
        total["deferred_updates"] = DeferredUpdates::instance().count();
        total["waiting_updates"] = DeferredUpdates::instance().waiting();
    }
    return total;
}

/// (owner, bytes, cold, pinned for good, host block, locked host block) of every managed storage.
/// The owner is the StorageImpl's address, torch's UntypedStorage._cdata; 0: not known yet.
py::list storages() {
    py::list result;
    for_each_pager([&](Pager& pager) {
        for (const StorageInfo& info : pager.storages()) {
            const bool cold =
                info.residency == Residency::kCold || info.residency == Residency::kRestoring;
            result.append(py::make_tuple(reinterpret_cast<uintptr_t>(info.owner), info.size_bytes,
                                         cold, info.pinned_for_good, info.has_host_block,
                                         info.host_is_locked));
        }
    });
    return result;
}

bool is_cold(const at::Tensor& tensor) {
    bool cold = false;
    if (PagerRegistry::instance().forked()) {
        return false;
    }
    for_tensor(tensor, [&](Pager& pager, c10::StorageImpl* storage) {
        Residency residency = Residency::kResident;
        const void* address = StorageOwnerPort::instance().address_of(storage);
        cold = cold || (pager.residency(address, &residency) && residency == Residency::kCold);
    });
    return cold;
}

bool is_managed(const at::Tensor& tensor) {
    bool managed = false;
    for_tensor(tensor, [&](Pager& /*pager*/, c10::StorageImpl* /*storage*/) { managed = true; });
    return managed;
}

c10::Storage unwrap_storage(const py::handle& storage) {
    if (!THPStorage_Check(storage.ptr())) {
        throw py::type_error("trainstream: expected a torch.UntypedStorage");
    }
    return THPStorage_Unpack(storage.ptr());
}

void pin_storage(const py::handle& storage, bool for_good) {
    const c10::Storage unwrapped = unwrap_storage(storage);
    py::gil_scoped_release no_gil;
    operator_guard::pin_storage(unwrapped, for_good);
}

/// Moves everything that may move to the host: for tests and for the impatient.
uint64_t evict_all() {
    uint64_t bytes = 0;
    for_each_pager([&](Pager& pager) { bytes += pager.evict_all(); });
    return bytes;
}

/// What code outside torch's sight may write: no host copy of it counts any more.
void mark_written(const std::vector<at::Tensor>& tensors) {
    if (!operator_guard::is_watching()) {
        return;  // Nothing moves, and nothing has a host copy.
    }
    UseScope uses;
    for (const at::Tensor& tensor : tensors) {
        uses.add(tensor, /*writes=*/true, UseKind::kMetadata, /*unseen=*/true);
    }
    uses.begin();
}

/// Calls function(Pager&, owners) with the managed storages of `tensors`.
template <typename Function>
void for_owners(const std::vector<at::Tensor>& tensors, const Function& function) {
    if (PagerRegistry::instance().forked()) {
        return;
    }
    std::map<Pager*, std::vector<void*>> owners;
    for (const at::Tensor& tensor : tensors) {
        for_tensor(tensor, [&](Pager& pager, c10::StorageImpl* storage) {
            owners[&pager].push_back(storage);
        });
    }
    for (const auto& [pager, storages] : owners) {
        function(*pager, storages);
    }
}

/// Makes the owners of their storages known, as operators do only while they are watched.
void note_owners(const std::vector<at::Tensor>& tensors) {
    for_owners(tensors, [](Pager& pager, const std::vector<void*>& owners) {
        pager.note_outputs(owners, CurrentStream(pager).id(), nullptr);
    });
}

/// The storages of `tensors` belong out from now on: see Pager::page.
void page(const std::vector<at::Tensor>& tensors) {
    for_owners(tensors, [](Pager& pager, const std::vector<void*>& owners) { pager.page(owners); });
}

void unpage(const std::vector<at::Tensor>& tensors) {
    for_owners(tensors, [](Pager& pager, const std::vector<void*>& owners) {
        pager.unpage(owners, CurrentStream(pager).id());
    });
}

void set_paged_room(uint64_t room_bytes) {
    for_each_pager([&](Pager& pager) { pager.set_paged_room(room_bytes); });
}

/// (most bytes on a device, bytes that left for want of room) since the last call; of several
/// devices, each one's most.
py::tuple take_peak() {
    PeakInfo most;
    for_each_pager([&](Pager& pager) {
        const PeakInfo peak = pager.take_peak();
        most.device_bytes = std::max(most.device_bytes, peak.device_bytes);
        most.pressed_bytes = std::max(most.pressed_bytes, peak.pressed_bytes);
    });
    return py::make_tuple(most.device_bytes, most.pressed_bytes);
}

void step_done() {
    for_each_pager([](Pager& pager) { pager.step_done(); });
}

void update_began() {
    for_each_pager([](Pager& pager) { pager.update_began(CurrentStream(pager).id()); });
}

void update_ended() {
    for_each_pager([](Pager& pager) { pager.update_ended(CurrentStream(pager).id()); });
}

py::dict dict_of(const StepTimes& times, const std::optional<Pager::Forecast>& forecast) {
    py::dict result;
    result["step_ns"] = times.step_ns;
    result["compute_ns"] = times.compute_ns();
    result["late_ns"] = times.stall_ns.at(static_cast<size_t>(Stall::kLate));
    result["demand_ns"] = times.stall_ns.at(static_cast<size_t>(Stall::kDemand));
    result["room_ns"] = times.stall_ns.at(static_cast<size_t>(Stall::kRoom));
    result["update_ns"] = times.update_ns;
    result["operations"] = times.operations;
    result["to_device_bytes"] = times.bytes.to_device;
    result["to_host_bytes"] = times.bytes.to_host;
    result["in_place_bytes"] = times.bytes.in_place;
    if (forecast.has_value()) {
        result["planned_bytes"] = forecast->planned_bytes;
        result["arena_bytes"] = forecast->sizes.arena_bytes;
        result["extra_bytes"] = forecast->sizes.extra_bytes;
    }
    if (forecast.has_value() && forecast->result.has_value()) {
        result["forecast_ns"] = forecast->result->step_ns;
        result["forecast_to_device_bytes"] = forecast->result->to_device_bytes;
        result["forecast_to_host_bytes"] = forecast->result->to_host_bytes;
        result["forecast_late"] = forecast->result->late_items;
    }
    return result;
}

/// A usual step of late for each device that has one, and what its plan is to take at these rates
/// (bytes a second; 0: not known, no forecast).
py::list usual_steps(double to_device, double to_host, double to_device_beside,
                     double to_host_beside) {
    const LinkRates rates{to_device, to_host, to_device_beside, to_host_beside};
    py::list result;
    for_each_pager([&](Pager& pager) {
        if (const std::optional<StepTimes> times = pager.usual_step()) {
            result.append(dict_of(*times, pager.forecast(rates)));
        }
    });
    return result;
}

py::dict dict_of(const PlannedStep& step, const StepTimes& times) {
    py::dict result;
    result["item_bytes"] = step.period.item_bytes;
    result["operations"] = step.period.operations;
    result["written"] = step.written;
    result["places"] = step.places;
    result["beside_bytes"] = step.beside_bytes;
    result["arena_bytes"] = step.sizes.arena_bytes;
    result["extra_bytes"] = step.sizes.extra_bytes;
    result["segment_bytes"] = step.sizes.segment_bytes;
    result["segments"] = step.sizes.segments;
    py::list points;
    for (const StepTimes::Point& point : times.points) {
        points.append(py::make_tuple(point.operation, point.compute_ns, point.stall_ns));
    }
    result["points"] = points;
    return result;
}

/// For each device with a plan, the step that it was made from, and times of one like it.
py::list recorded_steps() {
    py::list result;
    for_each_pager([&](Pager& pager) {
        if (const auto recorded = pager.recorded_step()) {
            result.append(dict_of(recorded->first, recorded->second));
        }
    });
    return result;
}

void close() {
    make_updates();  // Whoever still reads a weight, at the end of the process, is not announced.
    for_each_pager([](Pager& pager) { pager.close(); });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
    using NoGil = py::call_guard<py::gil_scoped_release>;
    install_hooks();
    module.attr("torch_version") = TORCH_VERSION;
    module.def("start_sim", &start_sim);
    module.def("sim_faults", &sim_faults);
    module.def("stats", &stats);
    module.def("storages", &storages);
    module.def("note_owners", &note_owners, NoGil());
    module.def("is_cold", &is_cold);
    module.def("is_managed", &is_managed);
    module.def("pin", &operator_guard::pin_for_good, NoGil());
    module.def("pin_briefly", &operator_guard::pin_briefly, NoGil());
    module.def("pin_storage", &pin_storage);
    module.def("evict_all", &evict_all, NoGil());
    module.def("mark_written", &mark_written, NoGil());
    py::class_<UnseenStep>(module, "UnseenStep").def(py::init<>(), NoGil());
    module.def("is_watching", &operator_guard::is_watching);
    module.def("page", &page, NoGil());
    module.def("unpage", &unpage, NoGil());
    module.def("set_paged_room", &set_paged_room, NoGil());
    module.def("take_peak", &take_peak);
    module.def("step_done", &step_done, NoGil());
    module.def("user_threads", &operator_guard::user_threads);
    module.def("update_began", &update_began, NoGil());
    module.def("update_ended", &update_ended, NoGil());
    module.def("usual_steps", &usual_steps);
    module.def("recorded_steps", &recorded_steps);
    module.def("close", &close, NoGil());
    add_optim_functions(module);
    add_hardware_functions(module);
    add_planner_functions(module);
    add_saved_tensor_functions(module);
    add_deferred_functions(module);
#ifdef TS_WITH_CUDA
    module.attr("has_cuda") = true;
    add_cuda_functions(module);
#else
    module.attr("has_cuda") = false;
    module.def("cuda_device_count",
               [] { return py::make_tuple(0, "this build of trainstream has no CUDA door"); });
#endif
}

}  // namespace trainstream
