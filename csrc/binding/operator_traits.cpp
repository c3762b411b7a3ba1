#include "binding/operator_traits.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include <ATen/core/dispatch/Dispatcher.h>

namespace trainstream {

namespace {

using NameSet = std::unordered_set<std::string_view>;

bool starts_with_any(std::string_view name, const std::vector<std::string_view>& prefixes) {
    return std::any_of(prefixes.begin(), prefixes.end(), [&](std::string_view prefix) {
        return name.substr(0, prefix.size()) == prefix;
    });
}

/// Reads each byte several times: worth the way to the device.
bool reuses_bytes(std::string_view name) {
    static const NameSet kNames = {"mm",
                                   "addmm",
                                   "bmm",
                                   "baddbmm",
                                   "addbmm",
                                   "linear",
                                   "matmul",
                                   "chain_matmul",
                                   "_scaled_mm",
                                   "_grouped_mm",
                                   "_int_mm",
                                   "_addmm_activation",
                                   "cdist",
                                   "lstm",
                                   "gru",
                                   "_cudnn_rnn",
                                   "_cudnn_rnn_backward",
                                   "sort",
                                   "topk",
                                   "_softmax",
                                   "_log_softmax",
                                   "native_layer_norm",
                                   "native_layer_norm_backward",
                                   "native_group_norm",
                                   "native_group_norm_backward",
                                   "native_batch_norm",
                                   "native_batch_norm_backward"};
    static const std::vector<std::string_view> kPrefixes = {"conv",
                                                            "_conv",
                                                            "cudnn_conv",
                                                            "mkldnn_",
                                                            "slow_conv",
                                                            "thnn_conv",
                                                            "scaled_dot_product",
                                                            "_scaled_dot_product",
                                                            "_flash_attention",
                                                            "_efficient_attention",
                                                            "_cudnn_attention",
                                                            "linalg_",
                                                            "fft_",
                                                            "_fft",
                                                            "cudnn_batch_norm"};
    return kNames.count(name) != 0 || starts_with_any(name, kPrefixes);
}

/// Touches few of the bytes: cold ones are read and written where they are.
bool touches_few(std::string_view name) {
    static const NameSet kNames = {"embedding",
                                   "embedding_dense_backward",
                                   "embedding_bag",
                                   "index",
                                   "index_select",
                                   "gather",
                                   "take",
                                   "take_along_dim",
                                   "index_put",
                                   "index_put_",
                                   "_index_put_impl_",
                                   "index_add",
                                   "index_add_",
                                   "index_copy",
                                   "index_copy_",
                                   "scatter",
                                   "scatter_",
                                   "scatter_add",
                                   "scatter_add_",
                                   "nll_loss_forward",
                                   "nll_loss_backward",
                                   "_local_scalar_dense",
                                   "item"};
    return kNames.count(name) != 0;
}

/// Touches each byte once: likewise, though a load ahead of need is faster.
bool touches_once(std::string_view name) {
    static const NameSet kNames = {
        "copy_",   "_to_copy",   "clone",        "fill_",         "zero_", "normal_", "uniform_",
        "random_", "bernoulli_", "exponential_", "trunc_normal_", "equal", "cat",     "stack"};
    static const std::vector<std::string_view> kPrefixes = {"_fused_", "_foreach_", "_amp_foreach"};
    return kNames.count(name) != 0 || starts_with_any(name, kPrefixes);
}

/// Looks at shapes only, or just passes its arguments on to other operators.
bool touches_nothing(std::string_view name) {
    static const NameSet kNames = {"empty_like",
                                   "zeros_like",
                                   "ones_like",
                                   "full_like",
                                   "rand_like",
                                   "randn_like",
                                   "randint_like",
                                   "new_empty",
                                   "new_empty_strided",
                                   "new_zeros",
                                   "new_ones",
                                   "new_full",
                                   "is_same_size",
                                   "size",
                                   "stride",
                                   "sym_size",
                                   "numel",
                                   "is_nonzero",
                                   "resize_",
                                   "set_",
                                   "result_type",
                                   "can_cast",
                                   "_has_compatible_shallow_copy_type",
                                   "to",
                                   "reshape",
                                   "contiguous",
                                   "expand_as",
                                   "type_as",
                                   "einsum",
                                   "_weight_norm",
                                   "dropout",
                                   "cross_entropy",
                                   "cross_entropy_loss",
                                   "nll_loss",
                                   "nll_loss_nd",
                                   "layer_norm",
                                   "group_norm",
                                   "batch_norm",
                                   "_batch_norm_impl_index",
                                   "softmax",
                                   "log_softmax",
                                   "lift_fresh",
                                   "requires_grad_",
                                   "retain_grad",
                                   "record_stream",
                                   "_record_function_enter_new"};
    return kNames.count(name) != 0;
}

/// Write to arguments that their schemas do not mark: running statistics, random states, workspaces
/// that a backward pass of oneDNN or cuDNN uses up.
bool writes_silently(std::string_view name) {
    static const NameSet kNames = {"batch_norm",
                                   "native_batch_norm",
                                   "cudnn_batch_norm",
                                   "miopen_batch_norm",
                                   "_batch_norm_impl_index",
                                   "_native_batch_norm_legit",
                                   "instance_norm",
                                   "batch_norm_gather_stats",
                                   "batch_norm_gather_stats_with_counts",
                                   "batch_norm_update_stats",
                                   "_cudnn_rnn",
                                   "_cudnn_rnn_flatten_weight",
                                   "rrelu_with_noise",
                                   "rrelu",
                                   "_thnn_fused_lstm_cell",
                                   "mkldnn_rnn_layer_backward",
                                   "_cudnn_rnn_backward",
                                   "cudnn_batch_norm_backward",
                                   "record_stream"};
    return kNames.count(name) != 0;
}

/// torch.tensor(list) fills such memory element by element, C++ extensions by kernels of their own;
/// no operator announces either.
bool leaves_raw(std::string_view name) { return starts_with_any(name, {"empty", "new_empty"}); }

/// A lazy clone shares memory between two storages, of which neither can be made to point
/// elsewhere.
bool keeps_address(std::string_view scope, std::string_view name) {
    return scope == "aten" && name == "_lazy_clone";
}

/// Whose schemas are kept right by torch's own tests.
bool trusted(std::string_view scope) {
    return scope == "aten" || scope == "prims" || scope == "_c10d_functional";
}

/// Made of other operators, which announce themselves: its own use must not keep cold bytes from
/// being brought in for them. Some have a kernel of their own besides, which is what runs:
/// silu_backward, mish_backward, _fused_rms_norm.
bool is_composite(const c10::FunctionSchema& schema) {
    const auto found = c10::Dispatcher::singleton().findSchema(schema.operator_name());
    const auto has = [&](c10::DispatchKey key) { return found->hasKernelForDispatchKey(key); };
    return found.has_value() && has(c10::DispatchKey::CompositeImplicitAutograd) &&
           !has(c10::DispatchKey::CPU) && !has(c10::DispatchKey::CUDA);
}

UseKind kind_of(std::string_view name, bool only_views) {
    if (only_views || touches_nothing(name)) {
        return UseKind::kMetadata;
    }
    if (reuses_bytes(name)) {
        return UseKind::kBringIn;
    }
    if (touches_few(name)) {
        return UseKind::kInPlace;
    }
    return touches_once(name) ? UseKind::kOnce : UseKind::kBringInIfRoom;
}

}  // namespace

OperatorTraits traits_of_schema(const c10::FunctionSchema& schema) {
    OperatorTraits traits;
    traits.name = schema.name();
    traits.overload = schema.overload_name();
    const size_t colons = traits.name.find("::");
    const bool scoped = colons != std::string::npos;
    const std::string_view scope(traits.name.data(), scoped ? colons : 0);
    const std::string_view name = std::string_view(traits.name).substr(scoped ? colons + 2 : 0);

    bool any_view = false;
    bool any_write = false;
    for (const c10::Argument& argument : schema.arguments()) {
        const c10::AliasInfo* alias = argument.alias_info();
        const bool writes = alias != nullptr && alias->isWrite();
        traits.writes.push_back(writes);
        any_write = any_write || writes;
        any_view = any_view || (alias != nullptr && !writes);
    }
    traits.only_views = trusted(scope) && any_view && !any_write;
    traits.writes_all = !trusted(scope) || writes_silently(name);
    traits.kind = trusted(scope) ? kind_of(name, traits.only_views) : UseKind::kBringIn;
    traits.leaves_raw = scope == "aten" && leaves_raw(name);
    traits.keeps_address = keeps_address(scope, name);
    traits.is_collective = scope == "c10d";
    return traits;
}

const OperatorTraits* traits_of(const at::RecordFunction& function) {
    // A schema keeps its name at one address for as long as it is registered. One that was removed
    // may leave its address to another, so the words are compared as well.
    thread_local std::unordered_map<const char*, std::unique_ptr<OperatorTraits>> cache;
    const char* name = function.name();
    const auto found = cache.find(name);
    if (found != cache.end() && found->second->name == name &&
        found->second->overload == function.overload_name()) {
        return found->second.get();
    }
    const std::optional<c10::FunctionSchema> schema = function.operator_schema();
    if (!schema.has_value()) {
        return nullptr;
    }
    auto& traits = cache[name];
    traits = std::make_unique<OperatorTraits>(traits_of_schema(*schema));
    if (traits->kind == UseKind::kBringInIfRoom && is_composite(*schema)) {
        traits->kind = UseKind::kMetadata;
    }
    return traits.get();
}

bool is_known_without_schema(const at::RecordFunction& function) {
    static const std::unordered_set<std::string_view> kNames = {
        "detach", "detach_", "_NoopSaveInputs", "torch::distributed::reducer::mul_out",
        "torch.distributed.ddp.reducer::copy_bucket_to_grad"};
    return kNames.count(function.name()) != 0;
}

bool runs_operators(const at::RecordFunction& function) {
    std::string_view name = function.name();
    const std::string_view evaluates = "autograd::engine::evaluate_function: ";
    if (name.substr(0, evaluates.size()) == evaluates) {
        name.remove_prefix(evaluates.size());
        const bool is_operators = !name.empty() && name.back() >= '0' && name.back() <= '9';
        if (is_operators || starts_with_any(name, {"torch::autograd::"})) {
            return true;
        }
    }
    return name == "CheckpointFunction" || name == "CheckpointFunctionBackward";
}

}  // namespace trainstream
