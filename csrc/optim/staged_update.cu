#include "optim/staged_update.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/assert.h"
#include "device/cuda_context.h"
#include "optim/update.h"

namespace trainstream::optim {
namespace {

/// A stream of one chunk that lies on the host, and its place on the device meanwhile.
struct Move {
    void* host;
    void* device;
    size_t size_bytes;
};

/// Where a chunk is while the device has it. Events say which of its three steps are done.
struct Buffer {
    void* memory = nullptr;
    cudaEvent_t has_come = nullptr;
    cudaEvent_t is_updated = nullptr;
    cudaEvent_t has_left = nullptr;
};

bool is_on_host(const void* address) {
    cudaPointerAttributes attributes = {};
    check_cuda("cudaPointerGetAttributes", cudaPointerGetAttributes(&attributes, address));
    return attributes.type != cudaMemoryTypeDevice;
}

/// Gives the host streams of a chunk their places in a buffer.
class Layout {
public:
    explicit Layout(const Buffer& buffer) : next_(static_cast<char*>(buffer.memory)) {}

    /// Afterwards `stream` is the place on the device. `written`: it goes back, too.
    template <typename T>
    void place(T** stream, size_t size_bytes, bool written) {
        if (*stream == nullptr || !is_on_host(*stream)) {
            return;
        }
        const Move move = {const_cast<void*>(static_cast<const void*>(*stream)), next_, size_bytes};
        *stream = reinterpret_cast<T*>(next_);
        next_ += (size_bytes + 255) / 256 * 256;
        in_.at(ins_++) = move;
        if (written) {
            out_.at(outs_++) = move;
        }
    }

    void copy_in(cudaStream_t stream) const {
        for (size_t i = 0; i < ins_; ++i) {
            check_cuda("cudaMemcpyAsync to the device",
                       cudaMemcpyAsync(in_.at(i).device, in_.at(i).host, in_.at(i).size_bytes,
                                       cudaMemcpyHostToDevice, stream));
        }
    }
    void copy_out(cudaStream_t stream) const {
        for (size_t i = 0; i < outs_; ++i) {
            check_cuda("cudaMemcpyAsync to the host",
                       cudaMemcpyAsync(out_.at(i).host, out_.at(i).device, out_.at(i).size_bytes,
                                       cudaMemcpyDeviceToHost, stream));
        }
    }

private:
    char* next_;
    std::array<Move, 6> in_ = {};
    std::array<Move, 6> out_ = {};
    size_t ins_ = 0;
    size_t outs_ = 0;
};

Layout place_streams(Formats formats, Slice* chunk, const Buffer& buffer) {
    Layout layout(buffer);
    const size_t count = chunk->count;
    layout.place(&chunk->grad, count * bytes_of(formats.grad), false);
    layout.place(&chunk->weight, count * bytes_of(formats.param), true);
    layout.place(&chunk->remainder, count * sizeof(int16_t), true);
    layout.place(&chunk->master, count * sizeof(float), true);
    layout.place(&chunk->exp_avg, count * bytes_of(formats.moments), true);
    layout.place(&chunk->exp_avg_sq, count * bytes_of(formats.moments), true);
    return layout;
}

/// What a tile takes in a buffer: its streams on the host.
size_t staged_tile_bytes(Formats formats, const Slice& slice) {
    size_t element_bytes = 0;
    const auto add = [&](const void* stream, size_t bytes) {
        element_bytes += stream != nullptr && is_on_host(stream) ? bytes : 0;
    };
    add(slice.grad, bytes_of(formats.grad));
    add(slice.weight, bytes_of(formats.param));
    add(slice.remainder, sizeof(int16_t));
    add(slice.master, sizeof(float));
    add(slice.exp_avg, bytes_of(formats.moments));
    add(slice.exp_avg_sq, bytes_of(formats.moments));
    return std::max<size_t>(element_bytes, 1) * kTile;
}

}  // namespace

class StagedUpdate::Impl {
public:
    explicit Impl(const StagedUpdateOptions& options) : options_(options) {
        TS_ASSERT_LT(0U, options.chunks);
        try {
            make();
        } catch (...) {
            destroy();
            throw;
        }
    }
    ~Impl() { destroy(); }
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    void update(Formats formats, const Slice& slice, const AdamW::Scalars& scalars, RoundingKey key,
                cudaStream_t stream) {
        record(start_, stream);
        for (const cudaStream_t own : {in_, kernels_, out_}) {
            wait(own, start_);
        }
        const size_t tiles =
            std::max<size_t>(options_.chunk_bytes / staged_tile_bytes(formats, slice), 1);
        for (size_t tile = 0; tile < tile_count(slice.count); tile += tiles) {
            Slice chunk = part_of(formats, slice, tile, tiles);
            const Buffer& buffer = buffers_[next_++ % buffers_.size()];
            const Layout layout = place_streams(formats, &chunk, buffer);
            wait(in_, buffer.has_left);
            layout.copy_in(in_);
            record(buffer.has_come, in_);
            wait(kernels_, buffer.has_come);
            update_cuda(formats, chunk, scalars, key, kernels_, options_.launch);
            record(buffer.is_updated, kernels_);
            wait(out_, buffer.is_updated);
            layout.copy_out(out_);
            record(buffer.has_left, out_);
        }
        record(end_, out_);
        wait(stream, end_);
    }

private:
    // The smallest chunk is one tile of at most 18 bytes an element.
    size_t buffer_bytes() const { return std::max(options_.chunk_bytes, 18 * kTile) + 6 * 256; }

    void make() {
        for (cudaStream_t* const own : {&in_, &kernels_, &out_}) {
            check_cuda("cudaStreamCreateWithFlags",
                       cudaStreamCreateWithFlags(own, cudaStreamNonBlocking));
        }
        make_event(&start_);
        make_event(&end_);
        buffers_.resize(options_.chunks);
        for (Buffer& buffer : buffers_) {
            check_cuda("cudaMalloc", cudaMalloc(&buffer.memory, buffer_bytes()));
            make_event(&buffer.has_come);
            make_event(&buffer.is_updated);
            make_event(&buffer.has_left);
        }
    }

    /// What was not made is null, which these functions refuse without harm.
    void destroy() noexcept {
        for (const cudaStream_t own : {in_, kernels_, out_}) {
            if (own != nullptr) {
                cudaStreamSynchronize(own);
                cudaStreamDestroy(own);
            }
        }
        for (const Buffer& buffer : buffers_) {
            for (const cudaEvent_t event : {buffer.has_come, buffer.is_updated, buffer.has_left}) {
                cudaEventDestroy(event);
            }
            cudaFree(buffer.memory);
        }
        cudaEventDestroy(start_);
        cudaEventDestroy(end_);
        static_cast<void>(cudaGetLastError());
    }

    static void make_event(cudaEvent_t* event) {
        check_cuda("cudaEventCreateWithFlags",
                   cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
    static void record(cudaEvent_t event, cudaStream_t stream) {
        check_cuda("cudaEventRecord", cudaEventRecord(event, stream));
    }
    /// An event that was never recorded counts as done.
    static void wait(cudaStream_t stream, cudaEvent_t event) {
        check_cuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, event, 0));
    }

    const StagedUpdateOptions options_;
    cudaStream_t in_ = nullptr;
    cudaStream_t kernels_ = nullptr;
    cudaStream_t out_ = nullptr;
    cudaEvent_t start_ = nullptr;
    cudaEvent_t end_ = nullptr;
    std::vector<Buffer> buffers_;
    size_t next_ = 0;
};

StagedUpdate::StagedUpdate(const StagedUpdateOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}

StagedUpdate::~StagedUpdate() = default;

void StagedUpdate::update(Formats formats, const Slice& slice, const AdamW::Scalars& scalars,
                          RoundingKey key, void* stream) {
    impl_->update(formats, slice, scalars, key, static_cast<cudaStream_t>(stream));
}

}  // namespace trainstream::optim
