"""The uses that no operator announces: each is announced once, the right way, and still works."""

import pytest
from real_runner import BY_OPTIMIZERS
from script_runner import has_real_extension, run_script

ON = {"PYTORCH_TRAINSTREAM": "1", "PYTORCH_TRAINSTREAM_CONF": "device:sim"}

# Prints, for each expression, what it announced and what it raised.
PROBE = """
import io, sys
import torch

def announced():
    calls = sys.modules["trainstream._C"].calls
    words = [c[0] + (":good" if c[2:] == (True,) else ":briefly" if c[2:] else "") for c in calls]
    calls.clear()
    return " ".join(words)

def probe(text):
    announced()
    try:
        eval(text)
        fault = ""
    except Exception as error:
        fault = " " + type(error).__name__
    print(f"{text} -> {announced()}{fault}")

x = torch.ones(4)
"""


def probe(tmp_path, before, expected, **environment):
    """Runs every expression of `expected` and compares what it announced."""
    lines = [f"probe({text!r})" for text in expected]
    result = run_script(tmp_path, "\n".join([PROBE, before, *lines]), **{**ON, **environment})
    assert result.status == 0, result.stderr
    got = dict(line.split(" -> ") for line in result.stdout.splitlines())
    assert got == {text: words for text, words in expected.items()}


def test_addresses_on_the_simulation_are_for_good(tmp_path):
    expected = {
        "x.data_ptr()": "pin",
        "x.untyped_storage().data_ptr()": "pin_storage:good",
        "x.storage().data_ptr()": "pin_storage:good",
        "x.requires_grad_(False).data_ptr()": "pin",
        "torch.nn.Parameter(x).data_ptr()": "pin",
    }
    probe(tmp_path, "", expected)


def test_numpy_is_announced_once_however_it_is_reached(tmp_path):
    pytest.importorskip("numpy")
    expected = {
        "x.numpy()": "pin",
        "np.asarray(x)": "pin",
        "np.add(x.numpy(), 1)": "pin",
        "np.from_dlpack(x)": "pin",
        "x.clone().requires_grad_().numpy()": "pin RuntimeError",
        "x.numpy(force=True)": "pin",
        "x.tolist()": "pin",
        "torch.from_numpy(np.ones(3))": "",
    }
    probe(tmp_path, "import numpy as np", expected)


def test_dlpack_is_announced_once_however_it_is_reached(tmp_path):
    expected = {
        "x.__dlpack__()": "pin",
        "x.__dlpack__(max_version=(1, 0))": "pin",
        "torch.from_dlpack(x)": "pin",
        "torch.to_dlpack(x)": "pin",
        "torch.utils.dlpack.to_dlpack(x)": "pin",
        "early(x)": "pin",
        "torch.Tensor.__dlpack_c_exchange_api__": " AttributeError",
    }
    probe(tmp_path, "from torch.utils.dlpack import to_dlpack as early", expected)


def test_storages_are_announced(tmp_path):
    expected = {
        "torch.empty(4).untyped_storage().resize_(64)": "pin_storage:briefly",
        "torch.empty(4).storage().resize_(64)": "pin_storage:briefly",
        "torch.ones(4).share_memory_()": "pin_storage:good",
        "torch.ones(4).untyped_storage()._share_filename_cpu_()": "pin_storage:good",
        "x.untyped_storage().byteswap(torch.float32)": "pin_storage:briefly",
        "torch.ones(4).untyped_storage()[1:3]": "pin_storage:good",
        "torch.ones(4).untyped_storage()[1]": "",
        "x.clone().apply_(lambda v: v + 1)": "pin",
        "x.clone().map_(x, lambda a, b: a + b)": "pin",
    }
    probe(tmp_path, "", expected)


def test_torch_comparing_addresses_pins_briefly_only(tmp_path):
    expected = {"torch.save({'x': x}, io.BytesIO())": " ".join(["pin_storage:briefly"] * 3)}
    probe(tmp_path, "", expected)


def test_tensors_without_memory_of_their_own_pass_untouched(tmp_path):
    before = "sparse = torch.eye(3).to_sparse()"
    expected = {"sparse.data_ptr()": " RuntimeError", "sparse.numpy()": " TypeError"}
    probe(tmp_path, before, expected)


def test_compiled_cpu_kernels_ask_for_addresses_that_are_announced(tmp_path):
    before = """
import ctypes
prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)
address = prototype(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)
assert address(x) == x.data_ptr() and address(torch.empty(0)) is None
"""
    probe(tmp_path, before, {"address(x)": "pin_briefly"})


def test_on_cuda_addresses_are_brief_and_interfaces_for_good(tmp_path):
    """With CPU tensors, since the patches do not look at the device; only the fake is asked."""
    before = """
sys.modules["trainstream._C"].has_cuda = True
import trainstream
from trainstream import _edges
_edges.install(sys.modules["trainstream._C"], "cuda")
"""
    expected = {
        "x.data_ptr()": "pin_briefly",
        "x.untyped_storage().data_ptr()": "pin_storage:briefly",
        "x.__cuda_array_interface__": "pin AttributeError",
        "torch.from_dlpack(x)": "pin",
        "x.numpy()": "",
    }
    probe(tmp_path, before, expected, PYTORCH_TRAINSTREAM="0")


def test_patches_keep_name_and_documentation(tmp_path):
    script = """
    import torch
    for owner in (torch.Tensor, torch.UntypedStorage):
        print(owner.data_ptr.__name__, owner.data_ptr.__doc__ == owner.data_ptr.__wrapped__.__doc__)
    """
    result = run_script(tmp_path, script, **ON)
    assert result.stdout == "data_ptr True\n" * 2, result.stderr


def test_subclasses_and_function_modes_see_the_public_methods(tmp_path):
    script = """
    import torch

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            print(function is torch.Tensor.data_ptr)
            return super().__torch_function__(function, types, args, kwargs or {})

    tensor = torch.ones(3)
    assert tensor.as_subclass(Logged).data_ptr() == tensor.data_ptr()
    """
    result = run_script(tmp_path, script, **ON)
    assert result.stdout == "True\n", result.stderr


COMPILED = """
import torch, warnings
import numpy as np
warnings.simplefilter("error")

def address_and_array(a):
    b = a * 2
    return b.sum() + int(b.data_ptr() != 0) + float(b.numpy().sum())

def traced_numpy(a):
    return torch.from_numpy(np.sin((a * 2).numpy())) + 1

def exported(a):
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(a * 3)).sum()

x = torch.arange(4.0)
for function, full in ((address_and_array, False), (traced_numpy, True), (exported, False)):
    if function is exported:
        warnings.simplefilter("ignore")  # Plain torch warns here.
    compiled = torch.compile(function, backend="eager", fullgraph=full)
    print(function.__name__, torch.equal(compiled(x), function(x)))

layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(layer.parameters())
step = torch.compile(lambda: optimizer.step(), backend="eager")
for _ in range(2):
    layer(torch.ones(1, 2)).sum().backward()
    step()
"""


def test_compiled_functions_work_without_new_breaks_or_warnings(tmp_path):
    """Goal: torch.compile sees the methods that it knows. Method: the same script plain and on;
    warnings are errors, and `fullgraph` allows no break."""
    pytest.importorskip("numpy")
    plain = run_script(tmp_path, COMPILED, preload=BY_OPTIMIZERS, PYTORCH_TRAINSTREAM="0")
    switched_on = run_script(tmp_path, COMPILED, **ON)
    assert plain.status == 0, plain.stderr
    assert switched_on.status == 0, switched_on.stderr
    assert switched_on.stdout == plain.stdout and plain.stdout.count("True") == 3
    assert "steps=2" in switched_on.stderr


REAL = """
import ctypes, torch, trainstream

def fill(start):  # 8 MiB each, 24 MiB of budget.
    return torch.arange(start, start + 2**21, dtype=torch.float32)

kept = [fill(i) for i in range(3)]
raw = (ctypes.c_float * 2**21).from_address(kept[0].data_ptr())
array = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(kept[1]))
more = [fill(i) for i in range(8)]
for tensor in more:
    tensor.add_(1)
raw[5], array[7] = -1.0, -2.0
print(kept[0][5].item(), kept[1][7].item(), kept[2][9].item(), more[7][0].item())
print(any(map(trainstream.is_cold, kept[:2])), any(map(trainstream.is_cold, kept + more)))
"""


@pytest.mark.skipif(not has_real_extension(), reason="trainstream._C is not built for this torch")
def test_kept_addresses_stay_right_under_pressure(tmp_path):
    conf = "vram:24MiB,device:sim"
    result = run_script(
        tmp_path,
        REAL,
        fresh=True,
        fake=False,
        PYTORCH_TRAINSTREAM="1",
        PYTORCH_TRAINSTREAM_CONF=conf,
    )
    assert result.stdout == "-1.0 -2.0 11.0 8.0\nFalse True\n", result.stderr
