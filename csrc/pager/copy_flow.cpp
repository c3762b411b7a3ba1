#include "pager/copy_flow.h"

#include "base/assert.h"
#include "base/error.h"

namespace trainstream {

CopyFlow::CopyFlow(Device& device, CopyDirection direction, const CopyPlaces& places,
                   size_t copy_bytes, size_t depth)
    : device_(device),
      direction_(direction),
      places_(places),
      copy_bytes_(copy_bytes),
      depth_(depth) {
    TS_ASSERT_GT(copy_bytes, size_t{0});
    TS_ASSERT_GT(depth, size_t{0});
    TS_ASSERT_LE(copy_bytes, places.host_bytes);
    TS_ASSERT_LE(copy_bytes, places.device_bytes);
}

CopyFlow::~CopyFlow() {
    for (const Event& event : under_way_) {
        try {
            if (event) {
                event->wait();
            }
        } catch (const Error&) {
            // A broken device: it copies nothing any more.
        }
    }
}

void CopyFlow::advance() {
    while (under_way_.size() < depth_) {
        under_way_.push_back(next_copy());
    }
    if (const Event& oldest = under_way_.front()) {
        oldest->wait();
    }
    while (!under_way_.empty() && (!under_way_.front() || under_way_.front()->is_done())) {
        under_way_.pop_front();
        done_bytes_ += copy_bytes_;
    }
}

Event CopyFlow::next_copy() {
    // Each time the next place: the same few bytes over and over would come from a cache.
    std::byte* const host =
        places_.host + asked_ % (places_.host_bytes / copy_bytes_) * copy_bytes_;
    std::byte* const device =
        places_.device + asked_ % (places_.device_bytes / copy_bytes_) * copy_bytes_;
    ++asked_;
    const bool to_host = direction_ == CopyDirection::kToHost;
    return device_.copy(direction_, to_host ? host : device, to_host ? device : host, copy_bytes_,
                        {});
}

}  // namespace trainstream
