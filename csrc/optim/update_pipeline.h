// csrc/optim/update_pipeline.h: one optimizer step of parameters on a device, shared between the
// host's cores and a kernel.
//
// The kernel takes work from the front of a list, the cores from its back, each as it has time,
// until they meet. So the split follows the rates of this very step; every engine gives the same
// bits, so it changes nothing else. What the cores need of device memory is copied to a staging
// slot and back, two chunks ahead of the one that they work on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "device/device.h"
#include "optim/host_engine.h"

namespace trainstream::optim {

/// The kernel's side. Work runs in the order given.
class StreamKernel {
public:
    virtual ~StreamKernel() = default;
    /// Enqueues one update; pointers may be of device or of page-locked host memory.
    virtual void launch(const SliceUpdate& update) = 0;
    /// The end of all that was launched so far.
    virtual Event record() = 0;
};

/// An update, and which of its bytes the host's cores can use where they are. Moments, masters,
/// remainders and checksums always are on the host.
struct DeviceUpdate {
    SliceUpdate update;
    bool grad_on_host = false;
    bool weight_on_host = false;
};

struct PipelineOptions {
    bool use_host = true;
    bool use_kernel = true;
    // 4 Mi elements: copies of 8 MiB in bf16, which reach 54 of the link's 55 GB/s, and a
    // millisecond of work, so that the two sides end within a chunk of each other. Half as many are
    // 6 to 14 % slower on an H200 (bench/tune_optimizer.py), twice as many no faster.
    size_t chunk_elements = size_t{4} << 20;
    // Chunks that the cores have under way at once: one being worked on, the others on their way.
    size_t slots = 3;
    // Chunks that the kernel has ahead of it: the cores' thread looks again only after a chunk of
    // its own, about as long as one of the kernel's. A third one ahead takes from the cores' share
    // what they would do faster.
    size_t launched_max = 2;

    /// Bytes of staging memory: weights and gradients of up to 4 bytes each.
    size_t staging_bytes() const { return slots * chunk_elements * 8; }
};

/// Which side did how much in the last run, in elements.
struct PipelineShare {
    uint64_t host = 0;
    uint64_t kernel = 0;
};

/// Owner: one optimizer step. Lock: none; the device has its own.
class UpdatePipeline {
public:
    /// `staging`: page-locked, options.staging_bytes() long; null when the host is not used.
    /// `kernel`: null when the kernel is not used. `slot_free`: slot_free() of the run before that
    /// had the same staging memory; empty: nothing uses it.
    UpdatePipeline(Device& device, HostEngine& host, StreamKernel* kernel, std::byte* staging,
                   const PipelineOptions& options, std::vector<Event> slot_free = {});

    /// Runs every update once; called once. Bytes in host memory are final when this returns; bytes
    /// in device memory once the events of `finished` are done. `ready`: after it the gradients
    /// are. Throws what the device throws: then no copy of ours is under way any more, but some
    /// updates have happened and some have not.
    PipelineShare run(std::span<const DeviceUpdate> updates, const Event& ready,
                      std::vector<Event>* finished);
    /// For each slot of the staging memory what still reads it; null: nothing.
    const std::vector<Event>& slot_free() const { return slot_free_; }

private:
    /// What one side takes at once: parts of one update or of several small ones.
    struct Chunk {
        std::vector<DeviceUpdate> parts;
        size_t elements = 0;
        size_t room = 0;  // Elements of a staging slot that it takes.
    };
    /// A chunk on its way to the cores: `host` has the addresses in the staging slot.
    struct Staged {
        Chunk chunk;
        std::vector<SliceUpdate> host;
        Event arrived;
        size_t slot = 0;
    };

    void run_all(std::deque<Chunk> chunks, const Event& ready);
    void wait_for_copies() noexcept;
    std::deque<Chunk> cut(std::span<const DeviceUpdate> updates) const;
    void launch_ahead(std::deque<Chunk>* chunks);
    void stage_ahead(std::deque<Chunk>* chunks, const Event& ready);
    Staged stage(Chunk chunk, const Event& ready);
    void work_on(Staged staged);

    Device& device_;
    HostEngine& host_;
    StreamKernel* const kernel_;
    std::byte* const staging_;
    const PipelineOptions options_;

    std::deque<Event> launched_;
    std::deque<Staged> staged_;
    Event last_arrival_;            // Of the copies to the host.
    std::vector<Event> slot_free_;  // The copies that still read each slot.
    std::vector<size_t> slots_;     // Slots that no staged chunk has.
    PipelineShare share_;
};

}  // namespace trainstream::optim
