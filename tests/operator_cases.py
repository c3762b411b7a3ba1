"""Operators on cold storages: a program that runs each of many and prints hashes of every result.

    CASES=mm,sort PROTOCOL=cold|clean|storm DEVICE=cpu|cuda python operator_cases.py

tests/test_operators.py runs it plain and under trainstream, and compares. A case is a generator: it
yields its inputs, which are then driven into host memory, and at last its results. `t.chill()`
drives everything there once more, as before a backward pass.

- cold: the inputs are in host memory when the operators begin.
- clean: they are on the device, and the host has the same bytes: a write that is not noticed is
  lost when they leave again, and counted (verify:1).
- storm: as cold, and a second thread drives out whatever it can all the time.
"""

import contextlib
import copy
import faulthandler
import hashlib
import io
import os
import pickle
import sys
import threading

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
import torch
import torch.nn.functional as F
from torch import nn

import trainstream

_C = sys.modules.get("trainstream._C") if trainstream.is_enabled() else None
CASES = {}


def case(function):
    CASES[function.__name__.rstrip("_")] = function
    return function


class Maker:
    """Makes inputs from one seed. `n` is an edge: n x n floats are large enough to be managed."""

    def __init__(self, device: str, protocol: str):
        self.device, self.protocol = device, protocol
        self.n = 48 if device == "cpu" else 512
        self.generator = torch.Generator(device).manual_seed(11)
        torch.manual_seed(12)

    def f(self, *shape, dtype=torch.float32):
        real = torch.randn(*shape, generator=self.generator, device=self.device)
        return real.to(dtype)

    def leaf(self, *shape, dtype=torch.float32):
        return self.f(*shape, dtype=dtype).requires_grad_()

    def i(self, high, *shape, dtype=torch.int64):
        options = {"generator": self.generator, "device": self.device, "dtype": dtype}
        return torch.randint(high, shape, **options)

    def b(self, *shape):
        return self.i(2, *shape).bool()

    def chill(self):
        if _C is not None:
            _C.evict_all()


def storages_of(value):
    """The storages inside tensors, sparse and nested ones too, lists and dictionaries."""
    if isinstance(value, (list, tuple)):
        return [s for part in value for s in storages_of(part)]
    if isinstance(value, dict):
        return storages_of(list(value.values()))
    if isinstance(value, nn.Module):
        return storages_of(list(value.state_dict().values()))
    if not isinstance(value, torch.Tensor):
        return []
    return [part.detach().untyped_storage() for part in parts_of(value)]


def parts_of(tensor):
    if tensor.layout == torch.sparse_coo:
        return [tensor.detach()._indices(), tensor.detach()._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        whole = tensor.detach()
        return [whole.crow_indices(), whole.col_indices(), whole.values()]
    if tensor.is_nested:
        return [tensor.values()] if tensor.layout == torch.jagged else list(tensor.unbind())
    return [tensor]


def bytes_of(storage, device):
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def digest(value):
    """A hash of every byte and shape inside `value`."""
    if isinstance(value, (list, tuple)):
        return hashlib.sha256("".join(map(digest, value)).encode()).hexdigest()[:16]
    if isinstance(value, dict):
        return digest([value[key] for key in sorted(value, key=str)])
    if isinstance(value, nn.Module):
        return digest(value.state_dict())
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
    hasher = hashlib.sha256(repr((value.dtype, value.layout)).encode())
    for part in parts_of(value):
        part = part.detach()
        if part.is_quantized:
            part = part.int_repr()
        flat = part.resolve_conj().resolve_neg().contiguous().reshape(-1).clone()
        hasher.update(repr((flat.dtype, tuple(part.shape))).encode())
        if flat.numel():
            hasher.update(bytes(flat.view(torch.uint8).cpu().numpy()))
    return hasher.hexdigest()[:16]


def grads(*tensors):
    return [tensor.grad for tensor in tensors]


# --- Matrices ---


@case
def mm(t):
    a, b = t.f(t.n, t.n), t.f(t.n, t.n)
    yield a, b
    yield a @ b, a.t() @ b, torch.mm(a, b, out=torch.empty_like(a))


@case
def mm_of_one_tensor_with_itself(t):
    a = t.f(t.n, t.n)
    yield [a]
    yield a @ a, a @ a.t()


@case
def addmm(t):
    c, a, b = t.f(t.n, t.n), t.f(t.n, t.n), t.f(t.n, t.n)
    yield a, b, c
    yield torch.addmm(c, a, b, beta=0.5, alpha=2.0), c.addmm_(a, b)


@case
def bmm(t):
    a, b, c = t.f(4, t.n, t.n), t.f(4, t.n, t.n), t.f(t.n, t.n)
    yield a, b, c
    yield torch.bmm(a, b), torch.baddbmm(a, a, b), torch.addbmm(c, a, b)


@case
def matrix_and_vector(t):
    a, v, c = t.f(t.n, t.n), t.f(t.n), t.f(t.n, t.n)
    yield a, v, c
    yield a.mv(v), torch.dot(a.view(-1), c.view(-1)), c.addr_(v, v), torch.outer(v, v)


@case
def einsum(t):
    a, b = t.leaf(3, t.n, t.n), t.leaf(3, t.n, t.n)
    yield a, b
    out = torch.einsum("bij,bjk->bik", a, b)
    t.chill()
    out.square().sum().backward()
    yield out, grads(a, b), torch.einsum("bii->bi", a), torch.tensordot(a, b, dims=([1, 2], [2, 1]))


@case
def linear(t):
    layer = nn.Linear(t.n, t.n, device=t.device)
    x = t.leaf(t.n, t.n)
    yield x, layer
    out = F.gelu(layer(x))
    t.chill()
    out.sum().backward()
    yield out, grads(x, *layer.parameters()), F.bilinear(x, x, t.f(3, t.n, t.n))


@case
def low_precision_matmul(t):
    a, b = t.f(t.n, t.n, dtype=torch.bfloat16), t.f(t.n, t.n, dtype=torch.bfloat16)
    h = t.f(t.n, t.n, dtype=torch.float16)
    yield a, b, h
    yield a @ b, h @ h, (a.float() @ b.float()).bfloat16()


@case
def integer_matmul(t):
    a, b = t.i(100, t.n, t.n, dtype=torch.int8), t.i(100, t.n, t.n, dtype=torch.int8)
    yield a, b
    yield [torch._int_mm(a, b)]


@case
def autocast(t):
    model = nn.Sequential(nn.Linear(t.n, t.n), nn.ReLU(), nn.Linear(t.n, t.n)).to(t.device)
    x = t.f(t.n, t.n)
    yield x, model
    with torch.autocast(t.device, dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
        t.chill()
        loss = loss + model(x * 2).sum()
    t.chill()
    loss.backward()
    yield loss, grads(*model.parameters())


@case
def complex_matmul(t):
    a, b = t.f(t.n, t.n, dtype=torch.complex64), t.f(t.n, t.n, dtype=torch.complex64)
    a.imag.copy_(t.f(t.n, t.n))
    yield a, b
    yield a @ b.conj(), a.mH @ b, torch.view_as_real(a) * 2, a.abs(), a.angle()


@case
def conjugate_and_negative_views(t):
    a = torch.complex(t.f(t.n, t.n), t.f(t.n, t.n))
    yield [a]
    lazy, negative = a.conj(), a.conj().imag
    lazy.mul_(2 + 1j)
    negative.add_(1)
    a.real[::2].zero_()
    yield lazy, negative, lazy.resolve_conj(), negative.resolve_neg(), lazy + 1


@case
def cholesky(t):
    a = t.f(t.n, t.n, dtype=torch.float64)
    spd = a @ a.t() + t.n * torch.eye(t.n, device=t.device)
    yield a, spd
    lower = torch.linalg.cholesky(spd)
    yield lower, torch.cholesky_solve(a, lower), torch.cholesky_inverse(lower)


@case
def svd(t):
    a = t.f(t.n, t.n).requires_grad_()
    yield [a]
    u, s, vh = torch.linalg.svd(a)
    t.chill()
    s.sum().backward()
    yield u, s, vh, a.grad


@case
def eigen(t):
    a = t.f(t.n, t.n, dtype=torch.float64)
    sym = a + a.t()
    yield a, sym
    yield torch.linalg.eigh(sym), torch.linalg.eigvals(a) if t.device == "cpu" else 0


@case
def solvers(t):
    a, b = t.f(t.n, t.n) + t.n * torch.eye(t.n, device=t.device), t.f(t.n, t.n)
    yield a, b
    lu, pivots = torch.linalg.lu_factor(a)
    yield (
        torch.linalg.solve(a, b),
        torch.linalg.qr(a),
        torch.linalg.inv(a),
        torch.linalg.det(a),
        torch.lu_solve(b, lu, pivots) if hasattr(torch, "lu_solve") else 0,
        torch.linalg.lstsq(a, b).solution,
        torch.linalg.matrix_exp(b / t.n),
        torch.triangular_solve(b, a.triu()).solution,
        torch.linalg.matrix_power(a / t.n, 3),
        torch.linalg.vector_norm(a),
    )


@case
def fft(t):
    a, z = t.f(t.n, t.n), t.f(t.n, t.n, dtype=torch.complex64)
    yield a, z
    spectrum = torch.fft.rfft2(a)
    t.chill()
    yield spectrum, torch.fft.irfft2(spectrum, s=a.shape), torch.fft.fft(z), torch.fft.fftshift(z)


@case
def stft(t):
    a = t.f(t.n * t.n)
    window = torch.hann_window(64, device=t.device)
    yield a, window
    spec = torch.stft(a, 64, window=window, return_complex=True)
    t.chill()
    yield spec, torch.istft(spec, 64, window=window)


@case
def distances(t):
    a, b = t.leaf(t.n, t.n), t.leaf(t.n, t.n)
    yield a, b
    out = torch.cdist(a, b)
    t.chill()
    if t.device == "cpu":
        out.sum().backward()
    yield out, grads(a, b), F.cosine_similarity(a, b), torch.kron(a[:8, :8], b)


# --- Layers ---


def conv_case(t, function, x_shape, w_shape, **options):
    x, w = t.leaf(*x_shape), t.leaf(*w_shape)
    bias = t.leaf(w_shape[0] if function is not F.conv_transpose2d else w_shape[1])
    yield x, w, bias
    out = function(x, w, bias, **options)
    t.chill()
    out.square().sum().backward()
    yield out, grads(x, w, bias)


@case
def conv1d(t):
    yield from conv_case(t, F.conv1d, (4, 16, t.n), (32, 16, 3), padding=1)


@case
def conv2d(t):
    yield from conv_case(t, F.conv2d, (2, 16, 24, 24), (16, 16, 3, 3), stride=2)


@case
def conv2d_grouped_and_dilated(t):
    yield from conv_case(t, F.conv2d, (2, 16, 24, 24), (32, 4, 3, 3), groups=4, dilation=2)


@case
def conv2d_channels_last(t):
    x = t.f(2, 16, 24, 24).to(memory_format=torch.channels_last).requires_grad_()
    layer = nn.Conv2d(16, 16, 3, device=t.device).to(memory_format=torch.channels_last)
    yield x, layer
    out = layer(x)
    t.chill()
    out.square().sum().backward()
    yield out, out.stride(), grads(x, *layer.parameters())


@case
def conv_transpose2d(t):
    yield from conv_case(t, F.conv_transpose2d, (2, 16, 12, 12), (16, 8, 4, 4), stride=2)


@case
def conv3d(t):
    yield from conv_case(t, F.conv3d, (1, 4, 10, 10, 10), (8, 4, 3, 3, 3))


def attention_case(t, dtype=torch.float32, **options):
    q, k, v = (t.leaf(2, 4, t.n, 32, dtype=dtype) for _ in range(3))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    yield q, k, v
    out = F.scaled_dot_product_attention(q, k, v, **options)
    t.chill()
    out.square().sum().backward()
    yield out, grads(q, k, v)


@case
def attention(t):
    yield from attention_case(t)


@case
def attention_causal(t):
    yield from attention_case(t, is_causal=True)


@case
def attention_bfloat16(t):
    yield from attention_case(t, dtype=torch.bfloat16, is_causal=True)


@case
def attention_masked(t):
    mask = t.b(t.n, t.n)
    yield from attention_case(t, attn_mask=mask)


@case
def attention_module(t):
    layer = nn.MultiheadAttention(t.n, 4, batch_first=True, device=t.device)
    x = t.leaf(4, t.n, t.n)
    yield x, layer
    out, weights = layer(x, x, x)
    t.chill()
    out.sum().backward()
    layer.eval()
    with torch.inference_mode():
        fast, _ = layer(x, x, x, need_weights=False)
    yield out, weights, fast, grads(x, *layer.parameters())


@case
def transformer_layer(t):
    layer = nn.TransformerEncoderLayer(t.n, 4, 64, 0.1, batch_first=True, device=t.device)
    x = t.leaf(4, t.n, t.n)
    yield x, layer
    out = layer(x)
    t.chill()
    out.sum().backward()
    layer.eval()
    with torch.no_grad():
        fast = layer(x)
    yield out, fast, grads(x, *layer.parameters())


@case
def embedding(t):
    layer = nn.Embedding(256, t.n, padding_idx=3, device=t.device)
    index = t.i(256, 64, t.n)
    yield index, layer
    out = layer(index)
    t.chill()
    out.square().sum().backward()
    yield out, layer.weight.grad


@case
def embedding_that_writes_its_weight(t):
    weight, index = t.f(256, t.n) * 3, t.i(256, 512)
    yield weight, index
    yield F.embedding(index, weight, max_norm=1.0), weight


@case
def embedding_with_sparse_gradient(t):
    layer = nn.Embedding(256, t.n, sparse=True, device=t.device)
    optimizer = torch.optim.SparseAdam(layer.parameters())
    index = t.i(256, 512)
    yield index, layer
    for _ in range(2):
        layer(index).square().sum().backward()
        t.chill()
        optimizer.step()
    yield layer.weight.grad.coalesce(), list(optimizer.state[layer.weight].values())


@case
def embedding_bag(t):
    weight, index = t.leaf(256, t.n), t.i(256, 64, 16)
    yield weight, index
    out = F.embedding_bag(index, weight, mode="sum")
    t.chill()
    out.square().sum().backward()
    yield out, weight.grad


def layer_case(t, layer, *shape):
    layer = layer.to(t.device)
    x = t.leaf(*shape)
    yield x, layer
    out = layer(x)
    t.chill()
    out.square().sum().backward()
    t.chill()
    again = layer(x.detach() * 2)
    yield out, again, grads(x, *layer.parameters()), layer


@case
def layer_norm(t):
    yield from layer_case(t, nn.LayerNorm(t.n), t.n, t.n)


@case
def rms_norm(t):
    yield from layer_case(t, nn.RMSNorm(t.n), t.n, t.n)


@case
def group_norm(t):
    yield from layer_case(t, nn.GroupNorm(4, 16), 4, 16, 12, 12)


@case
def batch_norm(t):
    yield from layer_case(t, nn.BatchNorm1d(t.n * 24), 8, t.n * 24)


@case
def batch_norm2d_channels_last(t):
    layer = nn.BatchNorm2d(512).to(t.device)
    x = t.f(2, 512, 4, 4).to(memory_format=torch.channels_last)
    yield x, layer
    yield layer(x), layer(x * 2), layer


@case
def instance_norm(t):
    yield from layer_case(
        t, nn.InstanceNorm1d(512, affine=True, track_running_stats=True), 4, 512, 8
    )


@case
def spectral_norm_that_writes_in_forward(t):
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(t.n * 24, 32))
    yield from layer_case(t, layer, 8, t.n * 24)


@case
def weight_norm(t):
    yield from layer_case(t, nn.utils.parametrizations.weight_norm(nn.Linear(t.n, t.n)), 8, t.n)


@case
def observers_that_write_in_forward(t):
    from torch.ao.quantization import FakeQuantize, FusedMovingAvgObsFakeQuantize

    layer = nn.Sequential(FakeQuantize(), FusedMovingAvgObsFakeQuantize())
    yield from layer_case(t, layer, t.n, t.n)


@case
def pooling(t):
    x = t.leaf(4, 8, 24, 24)
    yield [x]
    out, index = F.max_pool2d(x, 2, return_indices=True)
    t.chill()
    unpooled = F.max_unpool2d(out, index, 2) if t.device == "cpu" else out
    average = F.avg_pool2d(x, 3, stride=2)
    t.chill()
    (out.sum() + average.sum()).backward()
    yield out, index, unpooled, average, x.grad, F.adaptive_avg_pool2d(x, 5), F.unfold(x, 3)


@case
def resampling(t):
    x, grid = t.f(2, 8, 24, 24), t.f(2, 30, 30, 2).tanh()
    yield x, grid
    yield (
        F.interpolate(x, scale_factor=2, mode="nearest"),
        F.interpolate(x, size=(31, 17), mode="bilinear"),
        F.grid_sample(x, grid, align_corners=False),
        F.pixel_shuffle(x, 2),
        F.pad(x, (1, 2, 3, 4), mode="reflect"),
        F.pad(x, (1, 2, 3, 4), value=0.5),
    )


def recurrent_case(t, layer):
    layer = layer.to(t.device)
    x = t.leaf(12, 8, t.n)
    yield x, layer
    out, state = layer(x)
    t.chill()
    out.square().sum().backward()
    yield out, state, grads(x, *layer.parameters())


@case
def lstm(t):
    yield from recurrent_case(t, nn.LSTM(t.n, t.n, num_layers=2, bidirectional=True))


@case
def gru(t):
    yield from recurrent_case(t, nn.GRU(t.n, t.n))


@case
def packed_sequence(t):
    layer = nn.LSTM(t.n, t.n, device=t.device)
    x = t.leaf(12, 8, t.n)
    yield x, layer
    packed = nn.utils.rnn.pack_padded_sequence(x, [12, 11, 9, 9, 6, 4, 2, 1])
    t.chill()
    out, _ = nn.utils.rnn.pad_packed_sequence(layer(packed)[0])
    t.chill()
    out.sum().backward()
    yield out, x.grad


@case
def dropout(t):
    x = t.leaf(t.n, t.n)
    yield [x]
    out = F.dropout(F.dropout(x, 0.3), 0.2)
    t.chill()
    out.sum().backward()
    yield (
        out,
        x.grad,
        F.rrelu(x.detach(), training=True),
        F.alpha_dropout(x.detach(), training=True),
    )


@case
def activations(t):
    x = t.leaf(t.n, t.n)
    yield [x]
    functions = (F.relu, F.gelu, F.silu, F.elu, F.softplus, F.mish, F.hardtanh, F.logsigmoid, F.glu)
    outs = [function(x) for function in functions]
    t.chill()
    sum(out.sum() for out in outs).backward()
    yield outs, x.grad, F.leaky_relu_(x.detach()), F.threshold_(x.detach(), 0.1, 0.2)


@case
def softmax(t):
    x = t.leaf(t.n, t.n)
    yield [x]
    out, log = F.softmax(x, 0), F.log_softmax(x, 1)
    t.chill()
    (out * log).sum().backward()
    yield out, log, x.grad, torch.logsumexp(x, 0)


@case
def losses(t):
    x, target, soft = t.leaf(t.n, t.n), t.i(t.n, t.n), t.f(t.n, t.n).softmax(1)
    yield x, target, soft
    parts = [
        F.cross_entropy(x, target, ignore_index=1, label_smoothing=0.1),
        F.cross_entropy(x, soft),
        F.nll_loss(x.log_softmax(1), target),
        F.kl_div(x.log_softmax(1), soft, reduction="batchmean"),
        F.huber_loss(x, soft),
        F.smooth_l1_loss(x, soft),
        F.binary_cross_entropy_with_logits(x, soft),
        F.mse_loss(x, soft),
        F.l1_loss(x, soft),
        F.margin_ranking_loss(x, soft, soft.sign()),
    ]
    t.chill()
    sum(parts).backward()
    yield parts, x.grad


@case
def ctc_loss(t):
    if t.device != "cpu":
        return
    x = t.leaf(50, 8, 20)
    target = t.i(19, 8, 10) + 1
    yield x, target
    lengths = torch.full((8,), 50), torch.full((8,), 10)
    loss = F.ctc_loss(x.log_softmax(2), target, *lengths)
    t.chill()
    loss.backward()
    yield loss, x.grad


# --- Sorting, indexing, writing in places ---


@case
def sort(t):
    x, whole = t.f(t.n, t.n), t.i(50, t.n, t.n)
    yield x, whole
    yield (
        x.sort(0),
        whole.sort(stable=True),
        x.argsort(descending=True),
        x.msort(),
        torch.unique(whole, return_inverse=True, return_counts=True),
        torch.unique_consecutive(whole),
        x.median(),
    )


@case
def topk(t):
    x = t.f(t.n, t.n)
    yield [x]
    yield x.topk(5), x.kthvalue(3) if t.device == "cpu" else 0, x.max(1), x.argmin(), x.aminmax()


@case
def gather_and_scatter(t):
    x, index, y = t.f(t.n, t.n), t.i(t.n, t.n, t.n), t.f(t.n, t.n)
    order = torch.argsort(index, 0)
    yield x, index, y, order
    gathered = x.gather(0, index)
    x.scatter_(0, order, y)
    x.scatter_add_(0, order, y)
    x.scatter_(1, order, 0.25)
    t.chill()
    yield gathered, x, torch.take_along_dim(y, order, 0), y.scatter_reduce(0, order, x, "amax")


@case
def index_writes(t):
    x, y = t.f(t.n, t.n), t.f(t.n, t.n)
    rows = torch.randperm(t.n, generator=t.generator, device=t.device)[: t.n // 2]
    yield x, y, rows
    x.index_add_(0, rows, y[: len(rows)])
    x.index_copy_(1, rows, y[:, : len(rows)])
    x.index_fill_(0, rows[:3], 7.0)
    x[rows, 5] = 1.5
    x[:, rows] *= 2
    x.index_put_((rows, rows), y[0, : len(rows)], accumulate=True)
    x[x > 2.5] = 0.0
    x[3:9, ::2] = y[:6, : t.n // 2]
    yield x, x[rows], x.index_select(1, rows), x[rows[:, None], rows], y.take(rows)


@case
def masks(t):
    x, y, mask = t.f(t.n, t.n), t.f(t.n, t.n), t.b(t.n, t.n)
    yield x, y, mask
    x.masked_fill_(mask, -1.0)
    picked = y.masked_select(mask)
    y.masked_scatter_(mask, x)
    yield picked, torch.where(mask, x, y), torch.where(mask), mask.nonzero(), x[mask], (~mask).sum()


@case
def put_and_take(t):
    x, values = t.f(t.n, t.n), t.f(t.n)
    index = torch.randperm(t.n * t.n, generator=t.generator, device=t.device)[: t.n]
    yield x, values, index
    x.put_(index, values)
    x.diagonal().mul_(3)
    x.fill_diagonal_(0.5)
    yield x, x.take(index), torch.diag_embed(x), x.tril(), x.triu_(1), torch.block_diag(x, x)


@case
def joining_and_splitting(t):
    a, b = t.f(t.n, t.n), t.f(t.n, t.n)
    yield a, b
    pieces = torch.cat([a, b], 1).split(t.n // 3, 1)
    for piece in a.chunk(5):
        piece.add_(1)
    yield (
        pieces,
        torch.stack([a, b], 2),
        torch.cat([a.t(), b]),
        a.unbind(1),
        torch.cat([a, b], out=torch.empty(2 * t.n, t.n, device=t.device)),
        torch.broadcast_tensors(a, b[0]),
        torch.meshgrid(a[0], b[0], indexing="ij"),
        torch.cartesian_prod(a[0], b[0]),
        a.repeat(2, 3),
        a.repeat_interleave(2, 0),
        torch.hstack([a, b]),
    )


@case
def moving_elements(t):
    x = t.f(t.n, t.n)
    yield [x]
    yield x.roll(3, 1), x.flip(0), x.rot90(), x.movedim(0, 1).contiguous(), x.unfold(0, 5, 2) + 0


@case
def scans(t):
    x, whole = t.f(t.n, t.n), t.i(9, t.n, t.n)
    yield x, whole
    yield x.cumsum(0), x.cumprod(1), x.cummax(0), x.logcumsumexp(1), whole.cumsum_(1), x.diff()


@case
def counting(t):
    x, whole = t.f(t.n * t.n), t.i(50, t.n * t.n)
    edges = torch.linspace(-2, 2, 300, device=t.device)
    yield x, whole, edges
    yield (
        torch.bucketize(x, edges),
        torch.searchsorted(edges, x),
        torch.isin(whole, whole[:20]),
        torch.count_nonzero(whole),
        whole.bincount() if t.device == "cpu" else 0,
        x.histc(20) if t.device == "cpu" else 0,
        torch.quantile(x[:2000], 0.3),
    )


@case
def reductions(t):
    x, mask = t.f(t.n, t.n), t.b(t.n, t.n)
    yield x, mask
    yield (
        x.sum(),
        x.mean(0),
        x.std(1),
        x.prod(1),
        x.norm(),
        x.amax(0),
        mask.any(0),
        mask.all(),
        (
            torch.var_mean(x, 0),
            x.nansum(),
            torch.equal(x, x.clone()),
            torch.allclose(x, x + 1e-9),
        ),
    )


@case
def elementwise_in_place(t):
    x, y, z = t.f(t.n, t.n), t.f(t.n, t.n), t.f(t.n)
    yield x, y, z
    x.add_(y).mul_(2).sub_(z).div_(3).clamp_(-1, 1).addcmul_(y, y, value=0.1).lerp_(y, 0.3)
    x.addcdiv_(y, y.abs() + 1).pow_(2).neg_().abs_().sqrt_().exp_().log_().nan_to_num_()
    t.chill()
    x.t().add_(z).sigmoid_()
    torch.add(x, y, out=x)
    torch.sin(y, out=y[:])
    x[:, 3] += 1
    x += 1
    x *= x
    z.zero_()
    yield x.erfinv(), x.digamma(), torch.hypot(x, y), torch.atan2(x, y), x.fmod(0.3), x.floor_()


@case
def integers_and_flags(t):
    a, b = t.i(200, t.n, t.n, dtype=torch.uint8), t.i(100, t.n, t.n, dtype=torch.int8)
    c, s = t.b(t.n, t.n), t.i(9000, t.n, t.n, dtype=torch.int16)
    yield a, b, c, s
    a.add_(7).bitwise_xor_(3)
    b.mul_(2).__ilshift__(1)
    c.logical_xor_(a > 5)
    c |= b > 0
    yield (
        a // 3,
        a % 7,
        b >> 1,
        ~c,
        c & (s > 4000),
        s.float(),
        a.sum(),
        c.sum(),
        b.view(torch.uint8),
    )


@case
def random_fills(t):
    x, mask = t.f(t.n, t.n), t.b(t.n, t.n)
    generator = torch.Generator(t.device).manual_seed(3)
    yield x, mask
    draws = [
        getattr(x, name)(*arguments, generator=generator).clone()
        for name, *arguments in (
            ("normal_",),
            ("uniform_",),
            ("bernoulli_", 0.3),
            ("exponential_",),
            ("random_",),
            ("geometric_", 0.2),
            ("log_normal_",),
            ("cauchy_",),
        )
    ]
    mask.bernoulli_(generator=generator)
    weights = x.abs().nan_to_num_(1.0, 1.0, 1.0) + 0.1
    yield draws, x, torch.multinomial(weights, 3, generator=generator), torch.rand_like(x)


@case
def initializers(t):
    x = t.f(t.n, t.n)
    yield [x]
    done = []
    for name in ("xavier_uniform_", "kaiming_normal_", "orthogonal_", "trunc_normal_", "eye_"):
        getattr(nn.init, name)(x)
        t.chill()
        done.append(x.clone())
    yield done, x


# --- Lists, optimizers ---


@case
def foreach(t):
    a = [t.f(t.n, t.n) for _ in range(5)] + [t.f(3)]
    b = [t.f(t.n, t.n) for _ in range(5)] + [t.f(3)]
    yield a, b
    torch._foreach_add_(a, b, alpha=2)
    torch._foreach_mul_(a, 0.5)
    torch._foreach_addcdiv_(a, b, torch._foreach_add(torch._foreach_abs(b), 1.0), value=0.1)
    torch._foreach_lerp_(a, b, 0.3)
    norms = torch._foreach_norm(a)
    t.chill()
    torch._foreach_copy_(b, a)
    torch._foreach_sqrt_(torch._foreach_abs(b))
    torch._foreach_clamp_min_(a, -0.5)
    yield norms, torch._foreach_max(a), torch._foreach_zero_(b[:2]) or b, nn.utils.get_total_norm(a)


def optimizer_case(t, kind, **options):
    parameters = [nn.Parameter(t.f(t.n, t.n)) for _ in range(3)] + [nn.Parameter(t.f(3))]
    optimizer = kind(parameters, lr=0.1, **options)
    yield [parameters]
    for step in range(3):
        for p in parameters:
            p.grad = p.detach() * 0.5 + step
        nn.utils.clip_grad_norm_(parameters, 1.0)
        t.chill()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    saved = copy.deepcopy(optimizer.state_dict())
    t.chill()
    optimizer.load_state_dict(saved)
    yield [list(optimizer.state[p].values()) for p in parameters]


@case
def fused_adamw(t):
    yield from optimizer_case(t, torch.optim.AdamW, fused=True)


@case
def fused_adam_amsgrad(t):
    yield from optimizer_case(t, torch.optim.Adam, fused=True, amsgrad=True)


@case
def fused_sgd(t):
    yield from optimizer_case(t, torch.optim.SGD, fused=True, momentum=0.9)


@case
def fused_adagrad(t):
    if t.device != "cpu":
        return
    yield from optimizer_case(t, torch.optim.Adagrad, fused=True)


@case
def foreach_adamw(t):
    yield from optimizer_case(t, torch.optim.AdamW, foreach=True)


@case
def looping_sgd(t):
    yield from optimizer_case(t, torch.optim.SGD, foreach=False, momentum=0.9, nesterov=True)


@case
def rmsprop(t):
    yield from optimizer_case(t, torch.optim.RMSprop, foreach=True, centered=True, momentum=0.5)


@case
def muon_and_others(t):
    yield from optimizer_case(t, torch.optim.Adamax)


@case
def gradient_scaler(t):
    model = nn.Linear(t.n, t.n, device=t.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(t.device, init_scale=1024.0)
    x = t.f(t.n, t.n)
    yield x, model
    for factor in (1.0, float("inf"), 2.0):
        optimizer.zero_grad()
        scaler.scale(model(x).mean() * factor).backward()
        t.chill()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    yield grads(*model.parameters()), scaler.get_scale()


# --- Copies and conversions ---


@case
def copies(t):
    x, y = t.f(t.n, t.n), t.f(t.n, t.n)
    whole = t.i(9, t.n, t.n)
    yield x, y, whole
    y.copy_(x.t())
    whole.copy_(x * 10)
    y[1:].copy_(x[:-1], non_blocking=True)
    y[:, 0].copy_(torch.arange(t.n))
    yield (
        x.clone(),
        x.t().clone(memory_format=torch.contiguous_format),
        x.t().contiguous(),
        (
            torch.empty_like(x).copy_(whole),
            x.new_tensor(x),
            torch.as_tensor(x),
            torch.tensor(x.cpu().tolist()),
        ),
    )


@case
def conversions(t):
    x = t.f(t.n, t.n) * 10
    yield [x]
    kinds = (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.bool)
    done = [x.to(kind) for kind in kinds]
    t.chill()
    more = [torch.complex64, torch.float32] + [torch.float8_e4m3fn, torch.float8_e5m2]
    done += [done[0].to(kind).float() for kind in more[1:]]
    yield done, x.to(more[0]), x.half().double(), x.type_as(done[0]), x.cpu(), x.view(torch.int32)


@case
def memory_formats(t):
    x = t.f(2, 16, 24, 24)
    yield [x]
    last = x.to(memory_format=torch.channels_last)
    t.chill()
    last.mul_(2)
    yield last, last.stride(), last.contiguous(), last.clone(), torch.empty_like(last).copy_(x)


@case
def values_for_python(t):
    x, one, flag = t.f(t.n, t.n), t.f(t.n, t.n).sum(), t.b(t.n, t.n)
    yield x, one, flag
    yield x.tolist(), one.item(), x[3, 4].item(), bool(flag[0, 0]), int(flag.sum()), str(x), len(x)


@case
def numpy_arrays(t):
    if t.device != "cpu":
        return
    x = t.f(t.n, t.n)
    yield [x]
    array = x.numpy()
    array[3] = 5.0
    t.chill()
    x.add_(1)
    product = x @ x
    t.chill()
    array[4] += 1.0
    yield x, product, torch.from_numpy(array.copy())


@case
def numpy_arrays_of_lazy_views(t):
    if t.device != "cpu":
        return
    x = torch.complex(t.f(t.n, t.n), t.f(t.n, t.n))
    yield [x]
    array = x.conj().numpy(force=True)
    t.chill()
    filler = [torch.randn(t.n, t.n) for _ in range(8)]
    yield torch.from_numpy(array.copy()), filler


@case
def saving(t):
    x, layer = t.f(t.n, t.n), nn.Linear(t.n, t.n, device=t.device)
    content = {"x": x, "row": x[3], "turned": x.t(), "layer": layer.state_dict()}
    yield x, layer
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        file = io.BytesIO()
        torch.save(content, file, **options)
        t.chill()
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert loaded["row"].untyped_storage()._cdata == loaded["x"].untyped_storage()._cdata
        t.chill()
        loaded["x"].add_(1)
    yield loaded, loaded["row"] - x[3]


@case
def pickling_and_deepcopy(t):
    x, layer = t.f(t.n, t.n), nn.Linear(t.n, t.n, device=t.device)
    pair = [x, x[1:3], layer]
    yield x, layer
    twin = copy.deepcopy(pair)
    t.chill()
    reread = pickle.loads(pickle.dumps(pair))
    t.chill()
    for other in (twin, reread):
        other[0].mul_(2)
    yield twin, reread, copy.copy(x)


@case
def storages(t):
    x, y = t.f(t.n, t.n), t.f(t.n, t.n)
    yield x, y
    storage = x.untyped_storage()
    storage.copy_(y.untyped_storage())
    storage[5] = 7
    t.chill()
    twin = storage.clone()
    values = [storage[4], storage[5], len(storage), twin[5]]
    twin.fill_(1)
    t.chill()
    yield values, x, bytes_of(twin, t.device), x.storage().tolist()[:9] if t.device == "cpu" else 0


@case
def storage_slices(t):
    if t.device != "cpu":
        return  # Torch has them for host memory only.
    x = t.f(t.n, t.n)
    yield [x]
    head = x.untyped_storage()[:64]
    t.chill()
    x @ x
    t.chill()
    head.fill_(1)
    t.chill()
    yield [x]


# --- Sparse and nested ---


@case
def sparse_coo(t):
    dense = t.f(t.n, t.n) * t.b(t.n, t.n)
    sparse, other = dense.to_sparse(), t.f(t.n, t.n)
    yield sparse, other
    out = torch.sparse.mm(sparse, other)
    t.chill()
    yield (
        out,
        (sparse + sparse).coalesce(),
        sparse * 2,
        sparse.to_dense(),
        torch.sparse.sum(sparse, 0),
        sparse.t().coalesce(),
        other + sparse,
        torch.sparse.addmm(other, sparse, other),
        sparse.clone(),
        sparse.sparse_mask(sparse),
    )


@case
def sparse_coo_writes(t):
    index, values = t.i(t.n, 2, 4 * t.n), t.f(4 * t.n)
    sparse = torch.sparse_coo_tensor(index, values, (t.n, t.n))
    other = t.f(t.n, t.n)
    yield sparse, other
    joined = sparse.coalesce()
    joined.mul_(3)
    joined._values().add_(1)
    other.add_(joined)
    t.chill()
    yield joined, sparse.mul_(2), torch.cat([sparse, sparse]), joined.pow(2)


@case
def sparse_gradients(t):
    dense = t.f(t.n, t.n) * t.b(t.n, t.n)
    sparse = dense.to_sparse().requires_grad_()
    other = t.leaf(t.n, t.n)
    yield sparse, other
    out = torch.sparse.mm(sparse, other)
    t.chill()
    out.sum().backward()
    yield out, sparse.grad.coalesce(), other.grad


@case
def sparse_csr(t):
    dense = t.f(t.n, t.n) * t.b(t.n, t.n)
    sparse, other = dense.to_sparse_csr(), t.f(t.n, t.n)
    yield sparse, other
    product = sparse @ other
    t.chill()
    yield product, sparse @ other[:, 0], (sparse * 2).to_dense(), sparse.to_sparse(), sparse.clone()


@case
def nested(t):
    parts = [t.f(n, t.n) for n in (9, 30, 17)]
    whole = torch.nested.as_nested_tensor(parts, layout=torch.strided)
    weight = t.f(t.n, t.n)
    yield whole, weight
    out = F.linear(whole, weight)
    t.chill()
    padded = torch.nested.to_padded_tensor(out, 0.0)
    yield out, padded, F.relu(out), (out * 2).unbind()


@case
def jagged(t):
    parts = [t.f(n, t.n) for n in (9, 30, 17)]
    whole = torch.nested.nested_tensor(parts, layout=torch.jagged).requires_grad_()
    layer = nn.Linear(t.n, t.n, device=t.device)
    yield whole, layer
    out = F.gelu(layer(whole))
    t.chill()
    out.values().sum().backward()
    yield out, grads(*layer.parameters()), [part + 1 for part in out.detach().unbind()]


@case
def quantized(t):
    if t.device != "cpu":
        return
    x = t.f(t.n, t.n)
    yield [x]
    q = torch.quantize_per_tensor(x, 0.05, 3, torch.qint8)
    t.chill()
    yield q, q.dequantize(), q.int_repr(), q.reshape(-1).clone().dequantize()


# --- Views and storages that change ---


@case
def views(t):
    x = t.f(t.n, t.n)
    yield [x]
    windows = x.as_strided((t.n - 1, 2 * t.n), (t.n, 1))
    turned, row, wide = x.t(), x[5], x[:, :1].expand(t.n, t.n)
    row.add_(windows.mean(0)[: t.n])
    turned[2:4].mul_(3)
    x.view(-1)[::7].zero_()
    t.chill()
    x.narrow(1, 4, 9).copy_(turned[4:13].t() + 1)
    yield (
        windows,
        turned,
        row,
        wide + 1,
        x.view(t.n // 2, -1),
        x.unflatten(0, (2, -1)),
        x[None, ..., 3],
    )


@case
def views_made_before_a_write(t):
    x = t.f(t.n, t.n)
    y, z = x[1:], x.view(-1)[3:-3]
    yield x, y, z
    y.add_(1)
    t.chill()
    z.mul_(2)
    t.chill()
    x.t().sub_(0.5)
    yield x, y, z


@case
def overlapping_copies(t):
    x = t.f(t.n * t.n)
    yield [x]
    x[1:] = x[:-1].clone()
    x[: t.n] = x[t.n : 2 * t.n]
    x[::2].add_(x[1::2])
    yield [x]


@case
def resizing(t):
    x, y = t.f(t.n, t.n), t.f(t.n, t.n)
    yield x, y
    x.resize_(2 * t.n, t.n)[t.n :].fill_(3)
    t.chill()
    y.resize_(t.n // 2, t.n).add_(1)
    size = y.untyped_storage().size()
    y.untyped_storage().resize_(2 * size)
    t.chill()
    y.untyped_storage().resize_(size)
    z = torch.empty(0, device=t.device)
    torch.mul(x, 2, out=z)
    y.resize_as_(x)[t.n // 2 :].zero_()
    yield x, y[: t.n // 2], z


@case
def emptied_and_refilled(t):
    x = t.f(t.n, t.n)
    kept = x.clone()
    yield x, kept
    storage = x.untyped_storage()
    size = storage.size()
    storage.resize_(0)
    t.chill()
    filler = t.f(t.n, t.n)
    storage.resize_(size)
    x.copy_(kept)
    t.chill()
    yield x, filler


@case
def setting(t):
    x, y = t.f(t.n, t.n), t.f(t.n, t.n)
    yield x, y
    z = torch.empty(0, device=t.device).set_(x.untyped_storage(), 5, (t.n, 7), (3, 1))
    z.add_(1)
    x.set_(y)
    x.mul_(2)
    t.chill()
    y.as_strided_((t.n, 3), (5, 1))
    y.unsqueeze_(0).transpose_(1, 2)
    yield x, y, z


@case
def data_swaps(t):
    x, y, p = t.f(t.n, t.n), t.f(t.n, t.n), nn.Parameter(t.f(t.n, t.n))
    yield x, y, p
    x.data, y.data = y.data, x.data
    x.add_(1)
    t.chill()
    p.data = x
    p.data.mul_(2)
    torch.utils.swap_tensors(x, y)
    t.chill()
    with torch.no_grad():
        p.copy_(y)
    yield x, y, p


@case
def lazy_clones(t):
    x = t.f(t.n, t.n)
    yield [x]
    y = torch._lazy_clone(x)
    z = torch._lazy_clone(y)
    t.chill()
    before = y + z
    x.add_(1)
    t.chill()
    y.mul_(2)
    t.chill()
    array = z.cpu().numpy()
    t.chill()
    z.sub_(3)
    t.chill()
    yield before, x, y, z, torch.from_numpy(array.copy()) if t.device == "cpu" else 0


# --- Autograd, functions, compilers ---


@case
def double_backward(t):
    x, w = t.leaf(t.n, t.n), t.leaf(t.n, t.n)
    yield x, w
    out = torch.tanh(x @ w).square().sum()
    t.chill()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    t.chill()
    gradient.square().sum().backward()
    yield out, gradient, grads(x, w)


@case
def backward_through_writes(t):
    x, w = t.leaf(t.n, t.n), t.leaf(t.n, t.n)
    yield x, w
    y = x * 2
    y[3:5] = 0
    y[:, 7].mul_(3)
    y.add_(w).relu_()
    t.chill()
    loss = (y @ w).sum()
    loss.backward(retain_graph=True)
    t.chill()
    loss.backward()
    yield y, grads(x, w)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.extra = x * 3
        ctx.mark_non_differentiable(ctx.extra)
        return x * w, ctx.extra

    @staticmethod
    def backward(ctx, gradient, _):
        x, w = ctx.saved_tensors
        return gradient * w + ctx.extra, gradient * x


@case
def autograd_function(t):
    x, w = t.leaf(t.n, t.n), t.leaf(t.n, t.n)
    yield x, w
    out, extra = Scaled.apply(x, w)
    t.chill()
    out.square().sum().backward()
    yield out, extra, grads(x, w)


@case
def checkpointing(t):
    from torch.utils.checkpoint import checkpoint

    layer = nn.Sequential(nn.Linear(t.n, t.n), nn.GELU(), nn.Dropout(0.2)).to(t.device)
    x = t.leaf(t.n, t.n)
    yield x, layer
    out = checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=True)
    t.chill()
    out.square().sum().backward()
    yield out, grads(x, *layer.parameters())


@case
def saved_tensor_hooks(t):
    x = t.leaf(t.n, t.n)
    yield [x]
    with torch.autograd.graph.save_on_cpu():
        out = (x.sin() * x.cos()).exp()
    t.chill()
    out.sum().backward()
    yield out, x.grad


@case
def functional_transforms(t):
    from torch.func import functional_call, grad, jacrev, jvp, vmap

    layer = nn.Linear(t.n, t.n, device=t.device)
    x, v = t.f(t.n, t.n), t.f(t.n, t.n)
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    yield x, v, layer

    def loss(weights, row):
        return functional_call(layer, weights, (row,)).square().sum()

    each = vmap(grad(loss), (None, 0))(weights, x[:8])
    t.chill()
    yield each, jvp(torch.sin, (x,), (v,)), jacrev(lambda row: row @ x)(v[0]), vmap(torch.dot)(x, v)


@case
def compiled(t):
    model = nn.Sequential(nn.Linear(t.n, t.n), nn.GELU(), nn.Linear(t.n, t.n)).to(t.device)
    x = t.leaf(t.n, t.n)
    counter = t.f(t.n, t.n)
    yield x, model, counter

    def run(x, counter):
        counter.add_(1)
        return model(x) * counter

    outs = []
    for backend in ("eager", "aot_eager"):
        function = torch.compile(run, backend=backend)
        for _ in range(2):
            out = function(x, counter)
            t.chill()
            out.square().sum().backward()
            outs.append(out.detach())
    yield outs, grads(x, *model.parameters())


@case
def scripted(t):
    x, y = t.f(t.n, t.n), t.f(t.n, t.n)
    yield x, y

    def work(a, b):
        c = torch.mm(a, b)
        a.add_(c)
        return c * a + torch.cat([a, b]).sum()

    traced = torch.jit.trace(work, (x.clone(), y.clone()), check_trace=False)
    yield [traced(x, y) for _ in range(3)]


@case
def own_operator(t):
    library = torch.library.Library("trainstream_cases", "DEF")
    library.define("bump(Tensor(a!) x, Tensor[] more) -> Tensor")

    def bump(x, more):
        x.add_(1)
        return x + more[0] + more[1]

    library.impl("bump", bump, "CompositeExplicitAutograd")
    x, y, z = t.f(t.n, t.n), t.f(t.n, t.n), t.f(t.n, t.n)
    yield x, y, z
    out = torch.ops.trainstream_cases.bump(x, [y, z])
    t.chill()
    yield out, torch.ops.trainstream_cases.bump(y, [x, z])


@case
def own_operator_that_hides_its_writes(t):
    library = torch.library.Library("trainstream_hidden", "DEF")
    library.define("bump(Tensor x) -> int")
    library.impl("bump", lambda x: int(x.add_(1).numel()), "CompositeExplicitAutograd")
    x = t.f(t.n, t.n)
    yield [x]
    yield [torch.ops.trainstream_hidden.bump(x)]


@case
def subclasses(t):
    from torch.utils._pytree import tree_map

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, dtype=inner.dtype, device=inner.device
            )

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            def unwrap(value):
                return value.inner if isinstance(value, cls) else value

            def wrap(value):
                return cls(value) if isinstance(value, torch.Tensor) else value

            out = function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
            return args[0] if function.__name__.startswith("add_") else tree_map(wrap, out)

    x, y = t.f(t.n, t.n), t.f(t.n, t.n)
    yield x, y
    wrapped = Wrapper(x)
    out = (wrapped @ Wrapper(y)).relu()
    wrapped.add_(1)
    t.chill()
    yield out.inner, (out * 2).inner, x


# --- The program ---


def chilled(t, value):
    """Drives the inputs where the protocol wants them. Returns (managed, there)."""
    storages = storages_of(value)
    t.chill()
    if _C is None:
        return 0, 0
    flat = {s._cdata: bytes_of(s, t.device) for s in storages}.values()
    managed = [part for part in flat if _C.is_managed(part)]
    there = sum(map(_C.is_cold, managed))
    if t.protocol == "clean":
        for part in managed:
            part.flip(0)
        there = sum(not _C.is_cold(part) for part in managed)
    return len(managed), there


def run(name, t):
    faults = 0 if _C is None else _C.stats()["verify_faults"]
    steps = CASES[name](t)
    try:
        inputs = next(steps)
    except StopIteration:
        print(f"skip {name}")
        return
    if _C is not None:
        print("inputs", name, *chilled(t, inputs))
    results = next(steps)
    first = digest([results, inputs])
    t.chill()
    print("digest", name, first)
    again = digest([results, inputs])
    if again != first:
        print("changed", name, "by leaving once more")
    if _C is not None and _C.stats()["verify_faults"] != faults:
        print("fault", name, _C.stats()["verify_faults"] - faults, "writes were not announced")


@contextlib.contextmanager
def storm(on: bool):
    """Evictions all the time, in between operators and while they run."""
    over = threading.Event()

    def blow():
        while not over.is_set():
            _C.evict_all()

    thread = threading.Thread(target=blow)
    if on:
        thread.start()
    yield
    over.set()
    if on:
        thread.join()


def main():
    faulthandler.enable()
    faulthandler.dump_traceback_later(200, exit=True)
    torch.set_num_threads(1)
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    names = [name for name in os.environ.get("CASES", "").split(",") if name] or list(CASES)
    device = os.environ.get("DEVICE", "cpu")
    protocol = os.environ.get("PROTOCOL", "cold")
    with storm(protocol == "storm" and _C is not None):
        for name in names:
            print("begin", name, flush=True)
            try:
                run(name, Maker(device, protocol))
            except Exception as fault:
                print("raised", name, f"{type(fault).__name__}: {str(fault)[:200]!r}")


if __name__ == "__main__":
    main()
