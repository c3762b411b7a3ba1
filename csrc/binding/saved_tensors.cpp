#include "binding/saved_tensors.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "allocator/current_stream.h"
#include "binding/managed_storages.h"

namespace trainstream {

namespace py = pybind11;

namespace {

// How far ahead backward's needs are told: this part of the budget, and no more tensors than it
// takes no time to look at.
constexpr uint64_t kAheadPart = 16;
constexpr size_t kAheadTensors = 64;

/// The lock of every SaveOrder. A leaf, and held for a few pointers only.
std::mutex g_order_mutex;

bool is_leaf_parameter(const at::TensorBase& tensor) {
    return tensor.is_leaf() && tensor.requires_grad();
}

}  // namespace

/// What one thread has saved, as a list in that order: backward asks in reverse.
///
/// Owner: its thread and each SavedTensor in it. Lock: g_order_mutex.
class SaveOrder {
public:
    static const std::shared_ptr<SaveOrder>& of_this_thread() {
        thread_local const auto order = std::make_shared<SaveOrder>();
        return order;
    }

    void add(SavedTensor* saved) {
        const std::lock_guard<std::mutex> lock(g_order_mutex);
        saved->before_ = std::exchange(last_, saved);
        if (saved->before_ != nullptr) {
            saved->before_->after_ = saved;
        }
    }
    void remove(SavedTensor* saved) {
        const std::lock_guard<std::mutex> lock(g_order_mutex);
        if (saved->before_ != nullptr) {
            saved->before_->after_ = saved->after_;
        }
        (saved->after_ != nullptr ? saved->after_->before_ : last_) = saved->before_;
    }
    /// Storages saved just before `saved`, from the latest on, up to `bytes_max` but at least one.
    static std::vector<StoragePtr> before(const SavedTensor* saved, uint64_t bytes_max) {
        std::vector<StoragePtr> storages;
        uint64_t bytes = 0;
        const Pager* pager = saved->pager_;
        const Storage* previous = saved->storage_.get();
        const std::lock_guard<std::mutex> lock(g_order_mutex);
        for (size_t i = 0; i < kAheadTensors && bytes < bytes_max; ++i) {
            saved = saved->before_;
            if (saved == nullptr) {
                break;
            }
            // Views of one storage are mostly saved one after the other.
            if (saved->pager_ == pager && saved->storage_.get() != previous) {
                previous = saved->storage_.get();
                bytes += saved->storage_->size_bytes();
                storages.push_back(saved->storage_);
            }
        }
        return storages;
    }

private:
    SavedTensor* last_ = nullptr;
};

SavedTensor::SavedTensor(const at::Tensor& tensor)
    : is_parameter_(is_leaf_parameter(tensor)),
      // The other is a tensor of its own, so that it counts as one more who holds the storage.
      data_(is_parameter_ ? tensor : tensor.tensor_data()),
      version_(static_cast<uint32_t>(tensor._version())) {}

SavedTensor::~SavedTensor() {
    // In a forked child the locks are as other threads of the parent left them.
    if (storage_ != nullptr && !PagerRegistry::instance().forked()) {
        order_->remove(this);
        pager_->unsave(storage_);
    }
}

size_t SavedTensor::managed_bytes() const {
    size_t size_bytes = 0;
    if (data_.unsafeGetTensorImpl()->has_storage()) {
        for_storage(data_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(),
                    [&](Pager& /*pager*/, c10::StorageImpl* storage) {
                        size_bytes = storage->nbytes();  // Known: it is no compiler's tensor.
                    });
    }
    return size_bytes;
}

bool SavedTensor::count() {
    bool may_spill = false;
    for_storage(data_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(),
                [&](Pager& pager, c10::StorageImpl* owner) {
                    Save save = pager.save(owner);
                    pager_ = &pager;
                    storage_ = std::move(save.storage);
                    may_spill = save.may_spill;
                });
    if (storage_ != nullptr) {
        order_ = SaveOrder::of_this_thread();
        order_->add(this);
    }
    return may_spill;
}

void SavedTensor::spill(bool by_need) { pager_->spill(storage_, by_need); }

void SavedTensor::announce_use() const {
    if (storage_ == nullptr || !pager_->has_spilled() || PagerRegistry::instance().forked()) {
        return;
    }
    const uint64_t ahead_bytes = pager_->memory().budget_bytes() / kAheadPart;
    pager_->unpack(storage_, CurrentStream(*pager_).id(), SaveOrder::before(this, ahead_bytes));
}

void SavedTensor::check_version() const {
    const auto version = static_cast<uint32_t>(data_._version());
    TORCH_CHECK(version == version_,
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: [",
                data_.toString(), " ", data_.sizes(), "] is at version ", version,
                "; expected version ", version_,
                " instead. Hint: leave trainstream.spill_activations() out for torch to name the "
                "operation that saved it, or enable anomaly detection with "
                "torch.autograd.set_detect_anomaly(True).");
}

std::unique_ptr<SavedTensor> SpillHooks::pack(const at::Tensor& tensor) {
    auto saved = std::make_unique<SavedTensor>(tensor);
    if (saved->is_parameter() || PagerRegistry::instance().forked()) {
        return saved;
    }
    const size_t size_bytes = saved->managed_bytes();
    if (size_bytes == 0 || size_bytes < min_bytes_) {
        return saved;
    }
    // A view of a parameter is no activation either, though its storage would say so in time.
    const bool is_new = saved->count();
    const bool of_parameter = tensor.is_view() && is_leaf_parameter(tensor._base());
    if (is_new && !of_parameter && takes(size_bytes)) {
        saved->spill(/*by_need=*/share_ < 0);
    }
    return saved;
}

/// Whether the storage is of the share: by a running sum, so the same ones in each step.
bool SpillHooks::takes(size_t size_bytes) {
    if (share_ < 0) {
        return true;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    seen_bytes_ += size_bytes;
    if (static_cast<double>(spilled_bytes_ + size_bytes) >
        share_ * static_cast<double>(seen_bytes_)) {
        return false;
    }
    spilled_bytes_ += size_bytes;
    return true;
}

at::Tensor SpillHooks::unpack(const SavedTensor& saved) {
    saved.check_version();
    if (saved.is_parameter()) {
        return saved.data();
    }
    {
        const py::gil_scoped_release no_gil;
        saved.announce_use();
    }
    // Each time another tensor: whoever keeps it counts as holding the storage.
    return saved.data().tensor_data();
}

void add_saved_tensor_functions(py::module_& module) {
    py::class_<SavedTensor>(module, "SavedTensor");
    py::class_<SpillHooks>(module, "SpillHooks")
        .def(py::init<double, size_t>(), py::arg("share"), py::arg("min_bytes"))
        .def("pack", &SpillHooks::pack)
        .def("unpack", [](const SpillHooks& /*hooks*/, const SavedTensor& saved) {
            return SpillHooks::unpack(saved);
        });
}

}  // namespace trainstream
