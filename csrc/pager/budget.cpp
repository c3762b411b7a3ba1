#include "pager/budget.h"

#include "base/error.h"

namespace trainstream {

bool Budget::holds(const MemoryNeed& need) const {
    return need.device_bytes() <= device_bytes && need.paged_bytes <= host_bytes;
}

void Budget::check(const MemoryNeed& need) const {
    if (check_memory && !holds(need)) {
        throw errors::does_not_fit({need.fixed_bytes, need.resident_bytes, need.inflight_bytes,
                                    need.paged_bytes, device_bytes, host_bytes});
    }
}

}  // namespace trainstream
