#include "optim/update_pipeline.h"

#include <exception>
#include <utility>

#include "base/assert.h"

namespace trainstream::optim {

namespace {

// What a part takes of a slot is a multiple of 32 elements, so that all addresses in it are aligned
// to 64 bytes, whatever the formats.
constexpr size_t kRoomUnit = 32;

size_t room_of(size_t count) { return (count + kRoomUnit - 1) / kRoomUnit * kRoomUnit; }

}  // namespace

UpdatePipeline::UpdatePipeline(Device& device, HostEngine& host, StreamKernel* kernel,
                               std::byte* staging, const PipelineOptions& options,
                               std::vector<Event> slot_free)
    : device_(device),
      host_(host),
      kernel_(options.use_kernel ? kernel : nullptr),
      staging_(staging),
      options_(options),
      slot_free_(std::move(slot_free)) {
    slot_free_.resize(options.slots);
    TS_ASSERT(kernel_ != nullptr || options.use_host);
    TS_ASSERT_EQ(options.chunk_elements % kTile, 0u);
    for (size_t slot = 0; slot < options.slots; ++slot) {
        slots_.push_back(slot);
    }
}

PipelineShare UpdatePipeline::run(std::span<const DeviceUpdate> updates, const Event& ready,
                                  std::vector<Event>* finished) {
    try {
        run_all(cut(updates), ready);
    } catch (...) {
        wait_for_copies();
        throw;
    }
    if (kernel_ != nullptr) {
        finished->push_back(kernel_->record());
    }
    for (Event& event : slot_free_) {
        if (event != nullptr) {
            finished->push_back(event);
        }
    }
    return share_;
}

void UpdatePipeline::run_all(std::deque<Chunk> chunks, const Event& ready) {
    while (!chunks.empty() || !staged_.empty()) {
        launch_ahead(&chunks);
        stage_ahead(&chunks, ready);
        if (!staged_.empty()) {
            Staged next = std::move(staged_.front());
            staged_.pop_front();
            work_on(std::move(next));
        } else if (!chunks.empty() && !launched_.empty()) {
            launched_.front()->wait();  // All slots are taken by copies; the kernel goes on.
        }
    }
}

/// A device that refuses even that copies nothing any more.
void UpdatePipeline::wait_for_copies() noexcept {
    const auto wait = [](const Event& event) {
        try {
            if (event != nullptr) {
                event->wait();
            }
        } catch (const std::exception&) {
        }
    };
    for (const Event& event : slot_free_) {
        wait(event);
    }
    wait(last_arrival_);
}

std::deque<UpdatePipeline::Chunk> UpdatePipeline::cut(std::span<const DeviceUpdate> updates) const {
    std::deque<Chunk> chunks;
    const size_t tiles_max = options_.chunk_elements / kTile;
    for (const DeviceUpdate& update : updates) {
        const size_t tiles = tile_count(update.update.slice.count);
        for (size_t tile = 0; tile < tiles; tile += tiles_max) {
            DeviceUpdate part = update;
            part.update.slice =
                part_of(update.update.formats, update.update.slice, tile, tiles_max);
            const size_t room = room_of(part.update.slice.count);
            if (chunks.empty() || chunks.back().room + room > options_.chunk_elements) {
                chunks.emplace_back();
            }
            chunks.back().elements += part.update.slice.count;
            chunks.back().room += room;
            chunks.back().parts.push_back(part);
        }
    }
    return chunks;
}

void UpdatePipeline::launch_ahead(std::deque<Chunk>* chunks) {
    if (kernel_ == nullptr) {
        return;
    }
    while (!launched_.empty() && (launched_.front() == nullptr || launched_.front()->is_done())) {
        launched_.pop_front();
    }
    while (!chunks->empty() && (launched_.size() < options_.launched_max || !options_.use_host)) {
        for (const DeviceUpdate& part : chunks->front().parts) {
            kernel_->launch(part.update);
        }
        share_.kernel += chunks->front().elements;
        chunks->pop_front();
        launched_.push_back(kernel_->record());
    }
}

void UpdatePipeline::stage_ahead(std::deque<Chunk>* chunks, const Event& ready) {
    while (options_.use_host && !chunks->empty() && !slots_.empty()) {
        Chunk chunk = std::move(chunks->back());
        chunks->pop_back();
        share_.host += chunk.elements;
        staged_.push_back(stage(std::move(chunk), ready));
    }
}

UpdatePipeline::Staged UpdatePipeline::stage(Chunk chunk, const Event& ready) {
    Staged staged;
    staged.slot = slots_.back();
    slots_.pop_back();
    std::byte* free = staging_ + staged.slot * options_.chunk_elements * 8;
    // Copies of one direction run in order, so the last one's event stands for all.
    staged.arrived = ready;
    const auto bring = [&](const void* device_bytes, size_t count, NumberFormat format) {
        void* target = std::exchange(free, free + room_of(count) * bytes_of(format));
        last_arrival_ = device_.copy(CopyDirection::kToHost, target, device_bytes,
                                     count * bytes_of(format), {ready, slot_free_[staged.slot]});
        staged.arrived = last_arrival_;
        return target;
    };
    for (const DeviceUpdate& part : chunk.parts) {
        SliceUpdate host = part.update;
        const size_t count = host.slice.count;
        if (!part.grad_on_host) {
            host.slice.grad = bring(host.slice.grad, count, host.formats.grad);
        }
        if (!part.weight_on_host) {
            host.slice.weight = bring(host.slice.weight, count, host.formats.param);
        }
        staged.host.push_back(host);
    }
    staged.chunk = std::move(chunk);
    return staged;
}

void UpdatePipeline::work_on(Staged staged) {
    if (staged.arrived != nullptr) {
        staged.arrived->wait();
    }
    host_.update(staged.host);
    for (size_t i = 0; i < staged.host.size(); ++i) {
        const DeviceUpdate& part = staged.chunk.parts[i];
        const Slice& slice = staged.host[i].slice;
        if (!part.weight_on_host) {
            slot_free_[staged.slot] =
                device_.copy(CopyDirection::kToDevice, part.update.slice.weight, slice.weight,
                             slice.count * bytes_of(part.update.formats.param), {});
        }
    }
    slots_.push_back(staged.slot);
}

}  // namespace trainstream::optim
