#include "binding/hardware_module.h"

#include <string>

#include "allocator/current_stream.h"
#include "allocator/pager_registry.h"
#include "base/error.h"
#include "optim/usable_cores.h"
#include "pager/hardware_profile.h"
#include "pager/host_caches.h"

#ifdef TS_WITH_CUDA
#include "device/cuda_device.h"
#include "device/cuda_memory.h"
#endif

namespace trainstream {

namespace py = pybind11;

namespace {

c10::Device device_of(const std::string& kind, int index) {
    return kind == "cuda" ? c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index))
                          : c10::Device(c10::kCPU);
}

/// Calls function(device, memory): the pager's where storages of the device are managed, so that
/// the budget holds; doors of their own, for as long as the call lasts, where they are not.
template <typename Function>
auto with_device(const std::string& kind, int index, const Function& function) {
    const c10::Device named = device_of(kind, index);
    if (PagerRegistry::instance().forked()) {
        throw errors::invalid_argument(
            "the hardware cannot be measured in a forked child: the device is its parent's. "
            "Measure before the fork, or start processes by spawn.");
    }
    if (Pager* pager = PagerRegistry::instance().find(named)) {
        return function(pager->device(), pager->memory());
    }
#ifdef TS_WITH_CUDA
    if (named.is_cuda()) {
        CudaDevice door(index);
        CudaMemory memory(index, door.memory_info().free_bytes);
        return function(door, memory);
    }
#endif
    throw errors::invalid_argument("no device '" + kind + "' whose hardware could be measured.");
}

py::dict dict_of(const CopyRates& rates) {
    py::dict result;
    result["to_device"] = rates.to_device;
    result["to_host"] = rates.to_host;
    return result;
}

py::dict dict_of(const AvailableMemory& memory) {
    py::dict result;
    result["device_free_bytes"] = memory.device_free_bytes;
    result["device_total_bytes"] = memory.device_total_bytes;
    result["host_available_bytes"] = memory.host_bytes;
    return result;
}

/// The fields of trainstream.hardware.HardwareProfile, but for those of dict_of(AvailableMemory).
py::dict dict_of(const HardwareProfile& profile) {
    py::dict result;
    result["alone"] = dict_of(profile.alone);
    result["both"] = dict_of(profile.both);
    result["beside_cores"] = dict_of(profile.beside_cores);
    result["everything"] = dict_of(profile.everything);
    result["copies_64_kib"] = dict_of(profile.copies_64_kib);
    result["copies_1_mib"] = dict_of(profile.copies_1_mib);
    result["large_copy_bytes"] = profile.large_copy_bytes;
    result["cores"] = profile.cores;
    result["update_bytes_per_second"] = profile.update_bytes_per_second;
    result["update_beside_copies_bytes_per_second"] = profile.update_beside_copies_bytes_per_second;
    result["host_memory_bytes_per_second"] = profile.host_memory_bytes_per_second;
    result["page_lock_bytes_per_second"] = profile.page_lock_bytes_per_second;
    result["page_locked_bytes"] = profile.page_locked_bytes;
    result["page_lock_refusal"] = profile.page_lock_refusal;
    result["notes"] = profile.notes;
    return result;
}

py::dict measure(const std::string& kind, int index) {
    HardwareProfile profile;
    {
        const py::gil_scoped_release no_gil;
        profile = with_device(kind, index, [&](Device& device, DeviceMemory& memory) {
            ProfileOptions options;
            options.cores = optim::usable_cores();
            options.cache_bytes = last_level_cache_bytes();
            // The script's own stream: the allocator lays memory out for each stream that asks.
            options.stream = CurrentStream(device_of(kind, index)).id();
            return measure_hardware(device, memory, options);
        });
    }
    return dict_of(profile);
}

py::dict available(const std::string& kind, int index) {
    AvailableMemory memory;
    {
        const py::gil_scoped_release no_gil;
        memory = with_device(kind, index, [](Device& device, DeviceMemory& /*memory*/) {
            return available_memory(device);
        });
    }
    return dict_of(memory);
}

/// As the driver numbers its interface (13000 is 13.0); 0 without one.
int driver_version() {
    int version = 0;
#ifdef TS_WITH_CUDA
    check_cuda("cudaDriverGetVersion", cudaDriverGetVersion(&version));
#endif
    return version;
}

}  // namespace

void add_hardware_functions(py::module_& module) {
    module.def("measure_hardware", &measure);
    module.def("available_memory", &available);
    module.def("driver_version", &driver_version);
    module.def("usable_cores", &optim::usable_cores);
}

}  // namespace trainstream
