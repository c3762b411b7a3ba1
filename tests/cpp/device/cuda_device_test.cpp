// What only a CUDA device does. Skipped, with the reason, where no GPU answers.
#include "device/cuda_device.h"

#include <sys/mman.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "device/cuda_memory.h"
#include "pager/host_pool.h"
#include "support/in_child.h"

namespace trainstream {
namespace {

// Goal: asking for a device is harmless where there is none. Method: ask; a missing driver is a
// count of 0 with a reason, no exception.
TEST(CudaDeviceCountTest, NoDeviceIsACountOfZeroWithAReason) {
    std::string reason;
    const int count = CudaDevice::count(&reason);
    EXPECT_EQ(count == 0, !reason.empty()) << count << " devices; " << reason;
}

class CudaDeviceTest : public ::testing::Test {
protected:
    void SetUp() override {
        std::string reason;
        if (CudaDevice::count(&reason) == 0) {
            GTEST_SKIP() << reason;
        }
        device_ = std::make_unique<CudaDevice>(0);
        memory_ = std::make_unique<CudaMemory>(0, 512 * kMiB);
    }

    CudaDevice& device() { return *device_; }
    CudaMemory& memory() { return *memory_; }

private:
    std::unique_ptr<CudaDevice> device_;
    std::unique_ptr<CudaMemory> memory_;
};

/// A stream of its own, as torch would hand one in.
class Stream {
public:
    Stream() { check_cuda("stream", cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
    ~Stream() { cudaStreamDestroy(handle_); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    cudaStream_t handle() const { return handle_; }
    StreamId id() const { return reinterpret_cast<StreamId>(handle_); }

private:
    cudaStream_t handle_ = nullptr;
};

/// Ends a capture and throws its graph away; false when something broke it.
bool end_capture(const Stream& stream) {
    cudaGraph_t graph = nullptr;
    const bool whole = cudaStreamEndCapture(stream.handle(), &graph) == cudaSuccess;
    static_cast<void>(cudaGetLastError());
    if (graph != nullptr) {
        cudaGraphDestroy(graph);
    }
    return whole && graph != nullptr;
}

// Goal: the steady state creates nothing. Method: far more work than events, of which as many are
// needed as are ever in flight: two a copy and one a recorded point.
TEST_F(CudaDeviceTest, SteadyStateCreatesNoEvents) {
    HostPool pool(device(), {.limit_bytes = 64 * kMiB, .grow_in_background = false});
    const HostBlock host = pool.allocate(kMiB).value();
    void* const block = memory().allocate(kMiB, 0);
    for (int round = 0; round < 100; ++round) {
        Event last;
        for (int i = 0; i < 10; ++i) {
            const Event there = device().copy(CopyDirection::kToDevice, block, host.address, kMiB,
                                              {device().record(0), last});
            last = device().copy(CopyDirection::kToHost, host.address, block, kMiB, {there});
            device().wait(0, last);
        }
        last->wait();
        static_cast<void>(device().copy_stats());  // Counts what is done and gives its events back.
    }
    EXPECT_LE(device().events_created(), 10u * (2 + 2 + 1));
    memory().free(block);
}

// Goal: capture is seen on the stream that is captured, and what paging does meanwhile does not
// break it. Method: poll, lock pages and copy from another thread, in the strictest capture mode.
TEST_F(CudaDeviceTest, PagingDoesNotBreakACapture) {
    const Stream stream;
    EXPECT_FALSE(device().is_capturing(stream.id()));
    HostPool pool(device(), {.limit_bytes = 64 * kMiB, .grow_in_background = false});
    const HostBlock host = pool.allocate(32 * kMiB).value();
    void* const block = memory().allocate(32 * kMiB, 0);
    check_cuda("begin", cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeGlobal));
    EXPECT_TRUE(device().is_capturing(stream.id()));

    std::thread other([&] {
        const Event copy =
            device().copy(CopyDirection::kToDevice, block, host.address, 32 * kMiB, {});
        while (!copy->is_done()) {
            std::this_thread::yield();
        }
        EXPECT_TRUE(pool.allocate(4 * kMiB).has_value());
    });
    other.join();

    EXPECT_TRUE(end_capture(stream));
    EXPECT_FALSE(device().is_capturing(stream.id()));
    memory().free(block);
}

// Goal: what is cold can be used in place. Method: the device's address of a pool block is its own.
TEST_F(CudaDeviceTest, DeviceAddressesPoolBlocksByTheirHostAddress) {
    HostPool pool(device(), {.limit_bytes = 64 * kMiB, .grow_in_background = false});
    const HostBlock block = pool.allocate(4 * kMiB).value();
    ASSERT_TRUE(block.device_visible);

    void* seen = nullptr;
    check_cuda("cudaHostGetDevicePointer", cudaHostGetDevicePointer(&seen, block.address, 0));
    EXPECT_EQ(seen, block.address);
}

// Goal: the rule that shapes the host pool still holds. Method: a copy over two ranges side by
// side.
TEST_F(CudaDeviceTest, CopyBeyondOnePageLockedRangeIsRefused) {
    constexpr size_t kHalf = 2 * kMiB;
    auto* const range = static_cast<char*>(std::aligned_alloc(4 * kKiB, 2 * kHalf));
    std::memset(range, 1, 2 * kHalf);
    std::string reason;
    ASSERT_TRUE(device().page_lock(range, kHalf, &reason)) << reason;
    ASSERT_TRUE(device().page_lock(range + kHalf, kHalf, &reason)) << reason;
    void* const block = memory().allocate(2 * kHalf, 0);

    EXPECT_THROW(device().copy(CopyDirection::kToDevice, block, range, 2 * kHalf, {}), Error);
    EXPECT_NO_THROW(device().copy(CopyDirection::kToDevice, block, range, kHalf, {})->wait());

    device().page_unlock(range);
    device().page_unlock(range + kHalf);
    memory().free(block);
    std::free(range);
}

// Goal: a thread that never touched CUDA is left as it was. Method: the driver's own view of the
// current context, before and after.
TEST_F(CudaDeviceTest, CallsLeaveTheThreadsContextAlone) {
    std::thread([&] {
        int before = -1;
        int after = -1;
        check_cuda("cudaGetDevice", cudaGetDevice(&before));
        device().record(0)->wait();
        static_cast<void>(device().memory_info());
        check_cuda("cudaGetDevice", cudaGetDevice(&after));
        EXPECT_EQ(before, after);
    }).join();
}

// Goal: a refused copy is an error with words, and the device goes on. Method: a null target.
TEST_F(CudaDeviceTest, RefusedCopySaysWhy) {
    std::vector<char> bytes(512);
    try {
        device().copy(CopyDirection::kToDevice, nullptr, bytes.data(), bytes.size(), {});
        FAIL() << "a copy to null was accepted";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kCopyFailed);
        EXPECT_NE(std::string(error.what()).find("512 B to the device failed"), std::string::npos)
            << error.what();
    }
    void* const block = memory().allocate(512, 0);
    device().copy(CopyDirection::kToDevice, block, bytes.data(), bytes.size(), {})->wait();
    memory().free(block);
}

// Goal: a data-loader worker is not charged for locked memory. Method: the range is not mapped in
// the child, and is there again for children once it is unlocked.
TEST_F(CudaDeviceTest, ForkedChildDoesNotInheritLockedPages) {
    constexpr size_t kRange = 4 * kMiB;
    void* const range =
        mmap(nullptr, kRange, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(range, MAP_FAILED);
    std::memset(range, 1, kRange);
    const auto is_mapped = [&] {
        std::vector<unsigned char> pages(kRange / (4 * kKiB));
        return mincore(range, kRange, pages.data()) == 0;
    };
    std::string reason;
    ASSERT_TRUE(device().page_lock(range, kRange, &reason)) << reason;
    EXPECT_FALSE(testing::holds_in_child(is_mapped));

    device().page_unlock(range);

    EXPECT_TRUE(testing::holds_in_child(is_mapped));
    munmap(range, kRange);
}

}  // namespace
}  // namespace trainstream
