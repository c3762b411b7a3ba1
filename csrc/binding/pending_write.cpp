#include "binding/pending_write.h"

#include <cstdio>
#include <exception>
#include <utility>

#include "binding/managed_storages.h"

namespace trainstream {

PendingWrite::PendingWrite(const at::Tensor& tensor) : tensor_(tensor) {
    if (PagerRegistry::instance().forked() || !tensor.unsafeGetTensorImpl()->has_storage()) {
        return;
    }
    for_tensor(tensor, [&](Pager& pager, c10::StorageImpl* storage) {
        pager_ = &pager;
        storage_ = pager.announce_write(storage);
    });
}

PendingWrite::~PendingWrite() {
    try {
        end(std::nullopt);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
    }
}

void PendingWrite::end(std::optional<StreamId> stream) {
    const StoragePtr storage = std::exchange(storage_, nullptr);
    // In a forked child the locks are as other threads of the parent left them.
    if (storage != nullptr && !PagerRegistry::instance().forked()) {
        pager_->end_write(storage, stream);
    }
}

}  // namespace trainstream
