// csrc/optim/bulk_copy.h: Hopper's bulk copies between memory and shared memory, as functions. For
// .cu files alone.
//
// One thread asks for some KiB with one instruction, no register holds them on the way, and a
// barrier in shared memory counts the bytes that have come. Addresses and sizes are multiples of
// 16. PTX ISA, "cp.async.bulk" and "mbarrier".
#pragma once

#include <cstdint>

namespace trainstream::optim {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TS_HAS_BULK_COPY 1
#else
#define TS_HAS_BULK_COPY 0
#endif

#if defined(__CUDA_ARCH__) && TS_HAS_BULK_COPY

__device__ inline uint32_t shared_address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

/// Counts the bytes of one filling after another. `parity`: of the number of fillings before.
class BulkBarrier {
public:
    /// By one thread. The block must meet before another thread waits.
    __device__ void start() {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address()) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    /// Before the copies of one filling, by the thread that asks for them.
    __device__ void expect(uint32_t size_bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                     "r"(size_bytes)
                     : "memory");
    }
    __device__ void wait(uint32_t parity) {
        uint32_t is_done = 0;
        while (is_done == 0) {
            asm volatile(
                "{\n"
                ".reg .pred done;\n"
                "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                "selp.u32 %0, 1, 0, done;\n"
                "}\n"
                : "=r"(is_done)
                : "r"(address()), "r"(parity)
                : "memory");
        }
    }
    __device__ uint32_t address() const { return shared_address(this); }

private:
    uint64_t state_;
};

__device__ inline void bulk_copy_in(void* shared, const void* from, uint32_t size_bytes,
                                    const BulkBarrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared)),
        "l"(__cvta_generic_to_global(from)), "r"(size_bytes), "r"(barrier.address())
        : "memory");
}

__device__ inline void bulk_copy_out(void* to, const void* shared, uint32_t size_bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(shared_address(shared)), "r"(size_bytes)
                 : "memory");
}

/// Ends a group of copies out: those that this thread asked for since the last one.
__device__ inline void bulk_end_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Until all groups but the last kGroups have read their shared memory.
template <int kGroups>
__device__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

/// Until all groups have written what they copy.
__device__ inline void bulk_wait_written() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// What this thread wrote to shared memory is seen by the copies out that come after it.
__device__ inline void bulk_show_writes() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#endif

}  // namespace trainstream::optim
