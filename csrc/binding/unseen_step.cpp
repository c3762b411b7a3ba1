#include "binding/unseen_step.h"

#include "allocator/current_stream.h"
#include "allocator/pager_registry.h"

namespace trainstream {

UnseenStep::UnseenStep() {
    if (PagerRegistry::instance().forked()) {
        return;  // Nothing moves in a child.
    }
    PagerRegistry::instance().for_each([this](Pager& pager) {
        pager.begin_unseen_step(CurrentStream(pager).id());
        pagers_.push_back(&pager);
    });
}

UnseenStep::~UnseenStep() {
    if (PagerRegistry::instance().forked()) {
        return;  // The locks are as other threads of the parent left them.
    }
    for (Pager* pager : pagers_) {
        pager->end_unseen_step();
    }
}

}  // namespace trainstream
