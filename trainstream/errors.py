"""What trainstream says when something is wrong: every error class and every wording, in one place.

Apart from the code that finds the faults, so that messages are read and tested together. Imports
nothing, since the autoload entry point uses it inside `import torch`.
"""


class TrainstreamError(RuntimeError):
    """trainstream cannot be switched on here. The message says why and what to change."""


class ConfigError(ValueError):
    """A configuration key or value is wrong. The message names both and what is allowed."""


class BudgetError(MemoryError):
    """A run cannot fit its budget. The message has every term, and what would have to change."""


def unknown_key(key: str, known: list[str], nearest: str | None) -> ConfigError:
    hint = f" (did you mean {nearest!r}?)" if nearest else ""
    return ConfigError(f"unknown key {key!r}{hint}; known keys: {', '.join(known)}")


def bad_value(key: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"bad value {str(value)!r} for key {key!r}; allowed: {allowed}")


def duplicate_key(key: str, first: str, second: str) -> ConfigError:
    return ConfigError(f"key {key!r} is given twice ({first!r} and {second!r}); give it once")


def not_a_pair(item: str, known: list[str]) -> ConfigError:
    return ConfigError(
        f"{item!r} is not of the form key:value; write key:value,key:value with the keys "
        f"{', '.join(known)}"
    )


def bad_switch(value: str) -> ConfigError:
    return ConfigError(
        f"bad value {value!r} for PYTORCH_TRAINSTREAM; "
        "allowed: 1, true, yes, on or 0, false, no, off"
    )


def set_too_late() -> str:
    return (
        "PYTORCH_TRAINSTREAM=1 was set after torch was imported; set it in the shell or before "
        "`import torch`, or call trainstream.enable()"
    )


def report_not_written(path: str, reason: str) -> str:
    return f"no report: {path} cannot be written ({reason}); the run goes on without one"


def cannot_read(path: str, reason: str) -> TrainstreamError:
    return TrainstreamError(f"cannot read {path}: {reason}")


def no_run_report(path: str, reason: str) -> TrainstreamError:
    return TrainstreamError(
        f"{path} is no run report ({reason}); a run writes one with report:{path} in "
        "PYTORCH_TRAINSTREAM_CONF, or under `trainstream run --report`"
    )


def no_count(text: str) -> str:
    return f"{text!r} is no whole number from 1 on"


def no_rate(text: str) -> str:
    return f"{text!r} is no number above 0"


def no_model(name: str) -> TrainstreamError:
    return TrainstreamError(
        f"{name} is no config.json, no folder with one, and not in Hugging Face's cache; no "
        "network is asked: download the model's config.json and give its path"
    )


def no_model_config(path: str, reason: str) -> TrainstreamError:
    return TrainstreamError(f"{path} is no configuration of a decoder: {reason}")


def cannot_write(path: str, reason: str) -> TrainstreamError:
    return TrainstreamError(f"cannot write {path}: {reason}")


def needs_matplotlib() -> TrainstreamError:
    return TrainstreamError(
        "a PNG is drawn by matplotlib, which is not installed here; `pip install matplotlib`, or "
        "take the HTML page, which needs nothing"
    )


def no_such_program(name: str) -> TrainstreamError:
    return TrainstreamError(
        f"there is no script or program {name!r} here; write trainstream run [options] train.py "
        "[arguments], or trainstream run [options] torchrun ... train.py"
    )


def no_script() -> ConfigError:
    return ConfigError(
        "no script is given; write trainstream run [options] train.py [arguments] (--help has more)"
    )


def cannot_start(name: str, reason: str) -> TrainstreamError:
    return TrainstreamError(f"cannot start {name}: {reason}")


def autoload_is_off(variable: str) -> TrainstreamError:
    return TrainstreamError(
        f"{variable}=0 keeps torch from calling trainstream in the script; unset it, or call "
        "trainstream.enable() in the script"
    )


def no_entry_point() -> TrainstreamError:
    return TrainstreamError(
        "the script would not find trainstream: its entry point in the group torch.backends is not "
        "installed; `pip install --no-build-isolation .`, or `make build` in a clone"
    )


def no_benchmarks(folder: str) -> TrainstreamError:
    return TrainstreamError(
        f"benchmarks are scripts of a clone of the repository, and there are none in {folder}; "
        "clone it, build it (`make build`) and run `python -m trainstream bench` there"
    )


def no_such_benchmark(name: str, known: list[str]) -> ConfigError:
    return ConfigError(f"there is no benchmark {name!r}; there are: {', '.join(known)}")


def not_built(reason: str) -> TrainstreamError:
    return TrainstreamError(
        f"the compiled extension trainstream._C cannot be loaded ({reason}); build it with "
        "`pip install --no-build-isolation .` in the same environment as torch"
    )


def other_torch(built: str, running: str) -> TrainstreamError:
    return TrainstreamError(
        f"trainstream was built for torch {built}, but this is torch {running}; rebuild "
        "trainstream against this torch, or install the torch it was built for"
    )


def no_gpu(reason: str) -> TrainstreamError:
    return TrainstreamError(f"no GPU: {reason}; device:sim simulates one on CPU tensors")


def other_backend(backend: str) -> TrainstreamError:
    return TrainstreamError(
        f"torch's CUDA allocator is {backend!r}, and trainstream works over the native one only; "
        "remove backend: from PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF), or do not change "
        "the allocator yourself"
    )


def cuda_already_started() -> TrainstreamError:
    return TrainstreamError(
        "CUDA has already started, and torch changes the allocator only before that; call "
        "trainstream.allocator() before the first CUDA call, or call trainstream.enable(), which "
        "works later too"
    )


def already_enabled(current: str, wanted: str) -> TrainstreamError:
    return TrainstreamError(
        f"already switched on with {current}; this call asks for {wanted}. One process has one "
        "configuration: give it once, at the first call or in PYTORCH_TRAINSTREAM_CONF"
    )


def share_of_no_gpu(vram: object) -> ConfigError:
    return ConfigError(
        f"vram:{vram} is a share of a GPU, and there is none here; give a budget a size such as "
        "24GiB"
    )


def bad_argument(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"bad value {value!r} for {name}; allowed: {allowed}")


def no_device_to_measure(reason: str) -> TrainstreamError:
    return TrainstreamError(
        f"profile_hardware: no GPU to measure: {reason}; trainstream.enable(device='sim') "
        "simulates one on CPU tensors, and then that is measured"
    )


def measured_in_capture() -> RuntimeError:
    return RuntimeError(
        "trainstream.profile_hardware() copies and waits, which a CUDA graph cannot hold; call it "
        "before the capture"
    )


def unsupported_option(optimizer: str, name: str) -> ValueError:
    return ValueError(
        f"trainstream.optim.{optimizer} does not support {name}=True; use torch's own (optimizer:"
        "stock), whose states trainstream moves as it moves everything"
    )


def step_in_capture(optimizer: str) -> RuntimeError:
    return RuntimeError(
        f"trainstream.optim.{optimizer}.step() cannot be captured in a CUDA graph: the host takes "
        "part in it; capture forward and backward, and step outside"
    )


def gradient_after_update(accumulation_steps: int) -> RuntimeError:
    return RuntimeError(
        f"a parameter got one more gradient after its update: accumulation_steps is "
        f"{accumulation_steps}, but more backward passes came before step(); give their number, or "
        "None to update in step()"
    )


def sparse_gradient(optimizer: str) -> RuntimeError:
    return RuntimeError(
        f"trainstream.optim.{optimizer} does not support sparse gradients; use "
        "torch.optim.SparseAdam for these parameters, or sparse=False in their layer"
    )


def unsupported_dtype(optimizer: str, dtype: object) -> RuntimeError:
    return RuntimeError(
        f"trainstream.optim.{optimizer} works on float32, bfloat16 and float16, got {dtype}; use "
        "torch's own (optimizer:stock) for these parameters"
    )


def unsupported_tensor(optimizer: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"trainstream.optim.{optimizer} works on plain tensors on the CPU or a GPU, got {what}; "
        "use torch's own (optimizer:stock) for these parameters"
    )


def gradient_set_after_update() -> RuntimeError:
    return RuntimeError(
        "a parameter was given another gradient after its update, as DistributedDataParallel does "
        "when it averages: leave accumulation_steps at None, so that updates wait for step()"
    )


def state_of_other_shape(name: str, saved: object, wanted: object) -> ValueError:
    return ValueError(
        f"the loaded {name} has shape {tuple(saved)}, but its parameter has {tuple(wanted)}; the "
        "checkpoint belongs to another model, or its parameters are in another order"
    )


def not_an_optimizer(value: object) -> TypeError:
    return TypeError(
        f"trainstream.wrap() takes a torch.optim.Optimizer or None, got {type(value).__name__}"
    )


def wrapped_already() -> TrainstreamError:
    return TrainstreamError(
        "this model is wrapped already; call trainstream.unwrap(model) before wrapping it anew"
    )


def not_wrapped(function: str) -> TrainstreamError:
    return TrainstreamError(
        f"trainstream.{function}(): this model is not wrapped; trainstream.wrap(model, optimizer) "
        "returns the one to give here"
    )


def not_taken_over(reason: str) -> ValueError:
    return ValueError(
        f"the optimizer cannot be kept in host memory: {reason}; give offload=False, and "
        "trainstream moves its states as it moves everything, or a torch.optim.AdamW"
    )


def needs_host_optimizer(option: str) -> ValueError:
    return ValueError(
        f"{option} is of the optimizer in host memory, which offload=False rules out; leave one of "
        "them away"
    )


def no_blocks() -> ValueError:
    return ValueError(
        "no blocks were found to page: the model has no ModuleList or Sequential of layers with "
        "parameters; name them, as in blocks='model.layers'"
    )


def no_spilling(value: object) -> TrainstreamError:
    return TrainstreamError(
        f"activation_offload={value!r} needs trainstream.spill_activations, which this version "
        "does not have; with 'auto' the pager moves activations as it moves everything"
    )


def no_process_group() -> TrainstreamError:
    return TrainstreamError(
        "distributed=True, but there is no process group; call "
        "torch.distributed.init_process_group() before, or give distributed='auto'"
    )


def ranks_differ(ours: list[int], least: list[int], most: list[int]) -> RuntimeError:
    return RuntimeError(
        f"the ranks' models differ: this one has {ours[0]} tensors of {ours[1]} elements, others "
        f"have {least[0]} to {most[0]} of {least[1]} to {most[1]}; build the same model on each"
    )


def scaler_with_ranks() -> RuntimeError:
    return RuntimeError(
        "a GradScaler cannot be used where wrap() averages gradients over ranks: each rank would "
        "scale by its own overflows; use bfloat16, or DistributedDataParallel with "
        "distributed=False"
    )


def sparse_average() -> RuntimeError:
    return RuntimeError(
        "sparse gradients cannot be averaged over ranks; use sparse=False in their layer, or "
        "distributed=False and an average of your own"
    )


def host_ram_short(terms: dict[str, str], needed: str, limit: str, missing: str) -> BudgetError:
    sum_of_terms = " + ".join(f"{size} of {what}" for what, size in terms.items())
    return BudgetError(
        f"trainstream: the run cannot fit: host RAM must hold {needed} ({sum_of_terms}), the limit "
        f"is {limit}. Raise ram by at least {missing}, or try all the same with check_memory=False."
    )


def not_a_tensor(function: str, value: object) -> TypeError:
    return TypeError(f"trainstream.{function}() takes a torch.Tensor, got {type(value).__name__}")


def not_a_forward(function: object) -> TypeError:
    return TypeError(
        "trainstream.spill_activations() decorates a function that returns once its forward pass "
        f"is done, got {function!r}; inside a generator or coroutine use it as a context manager"
    )


def not_a_module(function: str, value: object) -> TypeError:
    return TypeError(
        f"trainstream.{function}() takes a torch.nn.Module or None, got {type(value).__name__}"
    )
