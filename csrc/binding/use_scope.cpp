#include "binding/use_scope.h"

#include <algorithm>

#include "allocator/current_stream.h"
#include "binding/deferred_updates.h"
#include "binding/managed_storages.h"

namespace trainstream {

UseScope::~UseScope() {
    for (OfPager& group : groups_) {
        group.pager->end_use(&group.pins);
    }
}

void UseScope::add(const at::Tensor& tensor, bool writes, UseKind kind, bool unseen) {
    if (PagerRegistry::instance().forked()) {
        return;  // Nothing moves in a child.
    }
    for_any_tensor(tensor, [](const c10::StorageImpl* storage) {
        DeferredUpdates::instance().make_for(storage);
    });
    for_tensor(tensor, [&](Pager& pager, c10::StorageImpl* storage) {
        auto group = std::find_if(groups_.begin(), groups_.end(),
                                  [&](const OfPager& other) { return other.pager == &pager; });
        if (group == groups_.end()) {
            group = groups_.insert(groups_.end(), {&pager, {}, {}});
        }
        group->uses.push_back({storage, writes, kind, unseen});
    });
}

void UseScope::let_go() {
    for (const OfPager& group : groups_) {
        std::vector<void*> owners;
        for (const Use& use : group.uses) {
            if (use.writes) {
                owners.push_back(use.owner);
            }
        }
        group.pager->let_go(owners);
    }
}

void UseScope::begin() {
    for (OfPager& group : groups_) {
        group.pager->begin_use(group.uses, CurrentStream(*group.pager).id(), &group.pins);
    }
}

void UseScope::also_on(StreamId stream) {
    for (OfPager& group : groups_) {
        group.pager->used_on(&group.pins, stream);
    }
}

}  // namespace trainstream
