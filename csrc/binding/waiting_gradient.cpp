#include "binding/waiting_gradient.h"

#include "binding/managed_storages.h"

namespace trainstream {

// To the pager it is a saved tensor: what nothing else holds is cold until it is asked for.
WaitingGradient::WaitingGradient(const at::Tensor& gradient) {
    if (PagerRegistry::instance().forked() || !gradient.unsafeGetTensorImpl()->has_storage()) {
        return;
    }
    for_tensor(gradient, [&](Pager& pager, c10::StorageImpl* storage) {
        const Save save = pager.save(storage);
        pager_ = &pager;
        storage_ = save.storage;
        if (save.is_first) {  // The step that made it may have ended: the host is ahead.
            pager.spill(save.storage, /*by_need=*/false);
            pager.boundary();  // The copy begins, though the script may run no operator now.
        }
    });
}

WaitingGradient::~WaitingGradient() {
    // In a forked child the locks are as other threads of the parent left them.
    if (storage_ != nullptr && !PagerRegistry::instance().forked()) {
        pager_->unsave(storage_);
    }
}

}  // namespace trainstream
