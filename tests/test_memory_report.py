"""The memory report: its sums are the extension's own, and storages have the names that fit."""

import textwrap

import pytest
import torch
from real_runner import needs_extension, run_real

import trainstream

pytestmark = needs_extension

# Weights of 4 MiB and 8 MiB; the head's weight is the embedding's. Sums are compared as they stand.
TIED = """
import json

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(2048, 512)
        self.inner = torch.nn.Linear(512, 2048, bias=False)
        self.outer = torch.nn.Linear(2048, 512, bias=False)
        self.head = torch.nn.Linear(512, 2048, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.outer(torch.relu(self.inner(self.embed(tokens)))))

model = Tied()

def train(optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(256)).square().mean().backward()
        optimizer.step()

def check_sums(report):
    s = stats()
    pool = s["optimizer_bytes"]
    total = report["total"]
    assert total["device"] == s["resident_bytes"], (total, s)
    assert total["host_pinned"] + total["host_pageable"] == s["cold_bytes"] + pool, (total, s)
    for place in total:
        assert total[place] == sum(row[place] for row in report["now"].values())

def in_all(row):
    return row["device"] + row["host_pinned"] + row["host_pageable"]
"""


def test_sums_are_those_of_the_statistics_under_pressure(tmp_path):
    script = """
    optimizer = torch.optim.AdamW(model.parameters())
    train(optimizer)
    report = trainstream.memory_report(model, as_dict=True)
    check_sums(report)
    print(*(in_all(report["now"][kind]) // 2**20 for kind in ("weights", "gradients", "optimizer")))
    print(report["total"]["device"] < 24 * 2**20 < sum(report["total"].values()))
    print(report["total"]["host_pinned"] > 0, report["total"]["host_pageable"])
    print(report["peak"]["device"] == stats()["peak_bytes"], report["enabled"], report["device"])
    """
    result = run_real(tmp_path, TIED + textwrap.dedent(script), "vram:24MiB")
    lines = result.stdout.splitlines()
    assert lines[0] == "12 12 24"  # Three weights of 4 MiB: the tied one counts once.
    assert lines[1:] == ["True", "True 0", "True True sim"]


def test_a_run_that_fits_counts_each_storage_once_by_its_kind(tmp_path):
    """Once it is quiet no operator says whose a new storage is."""
    script = """
    optimizer = torch.optim.AdamW(model.parameters())
    train(optimizer, steps=6)
    optimizer.zero_grad()
    model(torch.arange(256)).square().mean().backward()
    print(stats()["watching"])
    report = trainstream.memory_report(model, as_dict=True)
    check_sums(report)
    print(*(in_all(report["now"][kind]) // 2**20 for kind in report["now"]), *report["now"])
    """
    result = run_real(tmp_path, TIED + textwrap.dedent(script), "vram:1GiB")
    assert result.stdout.splitlines() == [
        "False",
        "12 12 24 0 0 weights gradients optimizer activations other",
    ]


def test_biggest_storages_have_the_parameters_names(tmp_path):
    script = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(optimizer)
    for storage in trainstream.memory_report(model, as_dict=True)["biggest"]:
        if storage["names"]:
            print(storage["kind"], storage["bytes"] // 2**20, " = ".join(storage["names"]))
    """
    result = run_real(tmp_path, TIED + textwrap.dedent(script), "vram:64MiB")
    assert sorted(result.stdout.splitlines()) == [
        "gradients 4 embed.weight.grad",
        "gradients 4 inner.weight.grad",
        "gradients 4 outer.weight.grad",
        "optimizer 4 embed.weight: momentum_buffer",
        "optimizer 4 inner.weight: momentum_buffer",
        "optimizer 4 outer.weight: momentum_buffer",
        "weights 4 embed.weight = head.weight",
        "weights 4 inner.weight",
        "weights 4 outer.weight",
    ]


def test_states_of_our_optimizer_are_in_host_memory(tmp_path):
    script = """
    from trainstream.optim import AdamW
    model.bfloat16()
    optimizer = AdamW(model.parameters())
    train(optimizer)
    report = trainstream.memory_report(model, as_dict=True)
    check_sums(report)
    print(report["now"]["optimizer"]["host_pinned"] == stats()["optimizer_bytes"] > 0)
    """
    assert run_real(tmp_path, TIED + textwrap.dedent(script), "vram:32MiB").stdout == "True\n"


def test_views_of_one_storage_count_once(tmp_path):
    script = """
    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.ones(8, 2**18)
            for i in range(8):
                self.register_parameter(f"p{i}", torch.nn.Parameter(flat[i]))
    report = trainstream.memory_report(Flat(), as_dict=True)
    print(report["now"]["weights"]["device"] // 2**20, report["biggest"][0]["names"][:2])
    print(trainstream.memory_report(Flat()).splitlines()[-1].split("  ")[-1])
    """
    result = run_real(tmp_path, textwrap.dedent(script), "vram:64MiB")
    assert result.stdout == "8 ['p0', 'p1']\np0, p1, p2 and 5 more\n"


def test_without_a_model_parameters_are_numbered_and_the_rest_is_activations(tmp_path):
    script = """
    kept = torch.ones(2**20)
    print(trainstream.memory_report(as_dict=True)["now"]["activations"]["device"] >= 2**22)
    del kept
    optimizer = torch.optim.AdamW(model.parameters())
    train(optimizer)
    named = [n for s in trainstream.memory_report(as_dict=True)["biggest"] for n in s["names"]]
    print("parameter 0 (2048, 512)" in named, "parameter 2 (512, 2048)" in named)
    del optimizer
    print(trainstream.memory_report(as_dict=True)["now"]["optimizer"]["device"])
    """
    result = run_real(tmp_path, TIED + textwrap.dedent(script), "vram:96MiB")
    assert result.stdout == "True\nTrue True\n0\n"


def test_pinned_storages_are_marked(tmp_path):
    script = """
    trainstream.pin(model.inner.weight)
    for storage in trainstream.memory_report(model, as_dict=True)["biggest"]:
        print(storage["names"][0], storage["pinned"], storage["place"])
    """
    result = run_real(tmp_path, TIED + textwrap.dedent(script), "vram:64MiB")
    assert result.stdout.splitlines() == [
        "embed.weight False device",
        "inner.weight True device",
        "outer.weight False device",
    ]


def test_looking_moves_and_pins_nothing(tmp_path):
    script = """
    train(torch.optim.AdamW(model.parameters()))
    before = stats()
    trainstream.memory_report(model)
    after = stats()
    times = ("copy_ns", "stall_ns")
    print([key for key in before if before[key] != after[key] and key not in times])
    """
    assert run_real(tmp_path, TIED + textwrap.dedent(script), "vram:24MiB").stdout == "[]\n"


def test_text_has_a_row_for_each_kind_and_the_total(tmp_path):
    script = """
    train(torch.optim.AdamW(model.parameters()))
    print(trainstream.memory_report(model))
    """
    lines = run_real(tmp_path, TIED + textwrap.dedent(script), "vram:24MiB").stdout.splitlines()
    assert lines[0] == "trainstream: memory on sim"
    assert [line.split()[0] for line in lines[2:8]] == [
        *("weights", "gradients", "optimizer", "activations", "other", "total")
    ]
    assert lines[8].startswith("peak: device ") and lines[9] == "biggest:"
    assert len({len(line) for line in lines[1:8]}) == 1  # A table.


def test_off_says_so_in_one_line_and_counts_the_models_tensors():
    model = torch.nn.Linear(1024, 1024)
    report = trainstream.memory_report(model, as_dict=True)
    assert report["enabled"] is False
    assert report["now"]["weights"]["host_pageable"] == 4 * (2**20 + 2**10)
    lines = trainstream.memory_report(model).splitlines()
    assert sum("trainstream is off" in line for line in lines) == 1
    assert "is off" in trainstream.memory_report().splitlines()[0]


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="takes a torch.nn.Module or None, got int"):
        trainstream.memory_report(3)
