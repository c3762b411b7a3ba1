#include "binding/adamw_step.h"
#include "allocator/current_stream.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "base/error.h"
#include "binding/use_scope.h"
#include "optim/checksum.h"
#include "optim/number_formats.h"
#include "optim/rounding.h"
#include "optim/update.h"

#ifdef TS_WITH_CUDA
#include "binding/cuda_adamw_step.h"
#endif

namespace trainstream {

namespace {

using optim::Formats;
using optim::NumberFormat;
using optim::SliceUpdate;

struct EngineSlot {
    std::mutex mutex;
    std::unique_ptr<optim::HostEngine> engine;
};

EngineSlot& engine_slot() {
    static auto* slot = new EngineSlot;  // Its threads may outlive every static object.
    return *slot;
}

NumberFormat format_of(const at::Tensor& tensor, const char* what) {
    switch (tensor.scalar_type()) {
        case at::kFloat:
            return NumberFormat::kFloat32;
        case at::kBFloat16:
            return NumberFormat::kBfloat16;
        case at::kHalf:
            return NumberFormat::kFloat16;
        default:
            throw errors::invalid_argument(std::string("AdamW: ") + what + " of type " +
                                           toString(tensor.scalar_type()) +
                                           "; float32, bfloat16 and float16 are supported.");
    }
}

void check_fits(const ParameterStep& step, const at::Tensor& tensor, const char* what) {
    if (tensor.sizes() != step.param.sizes() || tensor.strides() != step.param.strides()) {
        throw errors::invalid_argument(std::string("AdamW: ") + what +
                                       " has another shape or memory order than its parameter.");
    }
}

void check(const ParameterStep& step) {
    if (!step.param.is_non_overlapping_and_dense()) {
        throw errors::invalid_argument("AdamW: a parameter's elements do not fill their memory.");
    }
    if (step.grad.device() != step.param.device()) {
        throw errors::invalid_argument("AdamW: a gradient is not on its parameter's device.");
    }
    check_fits(step, step.grad, "a gradient");
    check_fits(step, step.exp_avg, "exp_avg");
    check_fits(step, step.exp_avg_sq, "exp_avg_sq");
    if (step.exp_avg.scalar_type() != step.exp_avg_sq.scalar_type()) {
        throw errors::invalid_argument("AdamW: exp_avg and exp_avg_sq are of different types.");
    }
    const auto tiles =
        static_cast<int64_t>(optim::tile_count(static_cast<size_t>(step.param.numel())));
    if (step.param.scalar_type() == at::kBFloat16 &&
        (step.residual.scalar_type() != at::kShort || step.checksums.numel() != tiles)) {
        throw errors::invalid_argument("AdamW: a bfloat16 parameter without its remainders.");
    }
    if (step.param.scalar_type() == at::kHalf && step.residual.scalar_type() != at::kFloat) {
        throw errors::invalid_argument("AdamW: a float16 parameter without its masters.");
    }
}

SliceUpdate update_of(const ParameterStep& step, const StepOptions& options) {
    SliceUpdate update;
    update.formats = {format_of(step.param, "a parameter"), format_of(step.grad, "a gradient"),
                      format_of(step.exp_avg, "a moment")};
    update.slice.count = static_cast<size_t>(step.param.numel());
    update.slice.grad = step.grad.const_data_ptr();
    update.slice.weight = step.param.mutable_data_ptr();
    update.slice.exp_avg = step.exp_avg.mutable_data_ptr();
    update.slice.exp_avg_sq = step.exp_avg_sq.mutable_data_ptr();
    if (update.formats.param == NumberFormat::kBfloat16) {
        update.slice.remainder = step.residual.mutable_data_ptr<int16_t>();
        update.slice.checksums =
            reinterpret_cast<uint32_t*>(step.checksums.mutable_data_ptr<int32_t>());
    } else if (update.formats.param == NumberFormat::kFloat16) {
        update.slice.master = step.residual.mutable_data_ptr<float>();
    }
    update.scalars = optim::AdamW::scalars(step.hyper, step.step, options.grad_scale);
    update.key = optim::rounding_key(options.seed, step.index, static_cast<uint64_t>(step.step));
    return update;
}

std::map<c10::Device, std::vector<SliceUpdate>, bool (*)(c10::Device, c10::Device)> by_device() {
    return std::map<c10::Device, std::vector<SliceUpdate>, bool (*)(c10::Device, c10::Device)>(
        [](c10::Device a, c10::Device b) {
            return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
        });
}

/// Whether two of them write the same weights: parameters may be views of one storage.
bool overlap(const std::vector<SliceUpdate>& updates) {
    std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
    for (const SliceUpdate& one : updates) {
        const size_t bytes = one.formats.param == NumberFormat::kFloat32 ? 4 : 2;
        const auto begin = reinterpret_cast<uintptr_t>(one.slice.weight);
        if (one.slice.count > 0) {
            ranges.emplace_back(begin, begin + one.slice.count * bytes);
        }
    }
    std::sort(ranges.begin(), ranges.end());
    return std::adjacent_find(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) {
               return b.first < a.second;
           }) != ranges.end();
}

/// Runs all at once; where two write the same weights one after the other, as torch does.
template <typename Run>
void in_turns(const std::vector<SliceUpdate>& updates, const Run& run) {
    if (!overlap(updates)) {
        run(std::span<const SliceUpdate>(updates));
        return;
    }
    for (const SliceUpdate& one : updates) {
        run(std::span<const SliceUpdate>(&one, 1));
    }
}

#ifndef TS_WITH_CUDA
[[noreturn]] void throw_no_engine(c10::Device device) {
    throw errors::invalid_argument("AdamW: parameters on " + device.str() +
                                   ", but this trainstream was built without CUDA.");
}
#endif

optim::PipelineShare run_on(c10::Device device, std::span<const SliceUpdate> updates,
                            const StepOptions& options) {
    optim::PipelineShare share;
    if (device.is_cpu()) {
        host_engine().update(updates);
        for (const SliceUpdate& update : updates) {
            share.host += update.slice.count;
        }
        return share;
    }
#ifdef TS_WITH_CUDA
    const StreamId after = options.after.value_or(CurrentStream(device).id());
    return cuda_adamw_step(device, updates, options.engine, after);
#else
    static_cast<void>(options);
    throw_no_engine(device);
#endif
}

}  // namespace

void set_host_engine(size_t threads, const std::string& instruction_set) {
    optim::HostEngineOptions options;
    options.threads = threads;
    for (const auto set : {optim::InstructionSet::kScalar, optim::InstructionSet::kAvx2,
                           optim::InstructionSet::kAvx512}) {
        if (instruction_set == name_of(set)) {
            options.instruction_set = set;
        }
    }
    EngineSlot& slot = engine_slot();
    const std::lock_guard<std::mutex> lock(slot.mutex);
    slot.engine = std::make_unique<optim::HostEngine>(options);
}

optim::HostEngine& host_engine() {
    EngineSlot& slot = engine_slot();
    const std::lock_guard<std::mutex> lock(slot.mutex);
    if (slot.engine == nullptr) {
        slot.engine = std::make_unique<optim::HostEngine>();
    }
    return *slot.engine;
}

optim::PipelineShare adamw_step(const std::vector<ParameterStep>& steps,
                                const StepOptions& options) {
    UseScope uses;
    for (const ParameterStep& step : steps) {
        check(step);
        uses.add(step.param, /*writes=*/true);
        uses.add(step.grad, /*writes=*/false);
    }
    if (options.engine != StepEngine::kStream) {
        uses.let_go();
    }
    uses.begin();
    auto groups = by_device();
    for (const ParameterStep& step : steps) {
        groups[step.param.device()].push_back(update_of(step, options));
    }
    optim::PipelineShare share;
    for (const auto& [device, updates] : groups) {
        in_turns(updates, [&, on = device](std::span<const SliceUpdate> part) {
            const optim::PipelineShare done = run_on(on, part, options);
            share.host += done.host;
            share.kernel += done.kernel;
        });
    }
    if (options.after.has_value()) {
        uses.also_on(*options.after);
    }
    return share;
}

double sum_of_squares(const std::vector<at::Tensor>& grads) {
    UseScope uses;
    bool on_host = true;
    for (const at::Tensor& grad : grads) {
        uses.add(grad, /*writes=*/false);
        on_host = on_host && grad.device().is_cpu();
    }
    uses.begin();
    std::vector<optim::Gradient> gradients;
    for (const at::Tensor& grad : grads) {
        if (!grad.is_non_overlapping_and_dense()) {
            throw errors::invalid_argument(
                "AdamW: a gradient's elements do not fill their memory.");
        }
        gradients.push_back({format_of(grad, "a gradient"), grad.const_data_ptr(),
                             static_cast<size_t>(grad.numel())});
    }
    if (on_host) {
        return host_engine().sum_of_squares(gradients);
    }
#ifdef TS_WITH_CUDA
    return cuda_sum_of_squares(grads, gradients);
#else
    throw_no_engine(grads.front().device());
#endif
}

at::Tensor join_master(const at::Tensor& weights, const at::Tensor& remainder,
                       const at::Tensor& checksums) {
    at::Tensor master =
        at::empty_strided(weights.sizes(), weights.strides(), weights.options().dtype(at::kFloat));
    UseScope uses;
    uses.add(weights, /*writes=*/false);
    uses.add(master, /*writes=*/true);
    uses.begin();
    const auto* weight = static_cast<const uint16_t*>(weights.const_data_ptr());
    const auto* rest = remainder.const_data_ptr<int16_t>();
    const auto* sums = reinterpret_cast<const uint32_t*>(checksums.const_data_ptr<int32_t>());
    auto* out = master.mutable_data_ptr<float>();
    const auto count = static_cast<size_t>(weights.numel());
    for (size_t begin = 0; begin < count; begin += optim::kTile) {
        const size_t end = std::min(count, begin + optim::kTile);
        const bool ours =
            optim::checksum(weight + begin, end - begin) == sums[begin / optim::kTile];
        for (size_t i = begin; i < end; ++i) {
            const int16_t low = ours ? rest[i] : int16_t{0};
            out[i] = optim::float_of_bits(optim::pattern_of(weight[i], low));
        }
    }
    return master;
}

void split_master(const at::Tensor& master, const at::Tensor& remainder,
                  const at::Tensor& checksums) {
    const at::Tensor weights =
        at::empty({master.numel()}, at::TensorOptions().dtype(at::kBFloat16));
    UseScope uses;
    uses.add(master, /*writes=*/false);
    uses.add(weights, /*writes=*/true);
    uses.begin();
    auto* weight = static_cast<uint16_t*>(weights.mutable_data_ptr());
    auto* rest = remainder.mutable_data_ptr<int16_t>();
    const auto* in = master.const_data_ptr<float>();
    const auto count = static_cast<size_t>(master.numel());
    for (size_t i = 0; i < count; ++i) {
        const uint32_t bits = optim::bits_of_float(in[i]);
        const uint32_t pattern = optim::is_nan_pattern(bits) ? optim::kCanonicalNan : bits;
        weight[i] = optim::weight_of_pattern(pattern);
        rest[i] = optim::remainder_of_pattern(pattern);
    }
    optim::checksum_tiles(weight, count,
                          reinterpret_cast<uint32_t*>(checksums.mutable_data_ptr<int32_t>()));
}

}  // namespace trainstream
