"""The command line: what each command does, its exit status, and that faults are one line."""

import dataclasses
import json
import os
import pty
import subprocess
import sys

import pytest
import torch
from real_runner import needs_extension
from script_runner import ROOT, make_site, plain_environment

from trainstream.cli import bench, console, estimate, main, model_shape, run

pytestmark = pytest.mark.any_torch

SHOW = "import os, sys\nprint(os.environ.get('PYTORCH_TRAINSTREAM_CONF'), sys.argv[1:])\n"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The entry point is found, as after an installation."""
    site = make_site(tmp_path_factory.mktemp("site"), "")
    return plain_environment(site)


def command(environment, *words, cwd=None, **variables):
    return subprocess.run(
        [sys.executable, "-m", "trainstream", *map(str, words)],
        env={**environment, **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def call(capsys, *words) -> tuple[int, str, str]:
    """In this process, which is faster; argparse ends it by SystemExit."""
    try:
        status = main.main([str(word) for word in words])
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


def test_help_of_every_command_has_examples(capsys):
    for name in ("run", "info", "fit", "report", "bench"):
        status, out, _ = call(capsys, name, "--help")
        assert status == 0 and f"  trainstream {name}" in out.split("examples:")[1]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, ""),
        (["nonsense"], 2, "invalid choice"),
        (["report"], 2, "required: run.json"),
        (["report", "no.json"], 1, "cannot read no.json: No such file"),
        (["report", __file__], 1, "is no run report"),
        (["run"], 2, "no script is given"),
        (["run", "--vram", "much", "train.py"], 2, "bad value 'much' for key 'vram'"),
        (["run", "--speed", "9", "train.py"], 2, "unrecognized arguments: --speed"),
        (["fit", "config.json"], 2, "required: --tokens"),
        (["fit", "config.json", "--tokens", "0"], 2, "'0' is no whole number from 1 on"),
        (["bench", "nothing"], 2, "there are: activations, budgets, compare, distributed_job"),
    ],
)
def test_faults_of_the_user_are_one_line_and_a_status(capsys, words, status, message):
    got, _, stderr = call(capsys, *words)
    assert got == status and message in stderr and "Traceback" not in stderr


def test_commands_that_read_files_import_no_torch(environment, tmp_path):
    script = "import sys\nfrom trainstream.cli import main\nmain.main(sys.argv[1:])\n"
    script += "print('torch' in sys.modules, file=sys.stderr)\n"
    for words in (["report", "no.json"], ["bench"], ["run"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True
        )
        assert done.stderr.splitlines()[-1] == "False", done.stderr


def test_run_sets_the_variables_and_passes_arguments_on(environment, tmp_path):
    (tmp_path / "train.py").write_text(SHOW)
    words = ["run", "--vram", "2GiB", "--report", "r.json", "train.py", "--vram", "x", "-m"]
    known = {"PYTORCH_TRAINSTREAM_CONF": "vram:1GiB,min_storage:2MiB"}
    done = command(environment, *words, cwd=tmp_path, **known)
    assert done.returncode == 0, done.stderr
    conf, arguments = done.stdout.split(" ", 1)
    settings = dict(item.split(":") for item in conf.split(","))
    assert (settings["vram"], settings["min_storage"]) == (str(2**31), str(2**21))
    assert settings["report"] == "r.json" and arguments == "['--vram', 'x', '-m']\n"


def test_run_starts_modules_and_programs_and_hands_their_status_on(environment, tmp_path):
    (tmp_path / "work.py").write_text(SHOW + "sys.exit(7)\n")
    for words in (["-m", "work"], [sys.executable, "work.py"], ["--", "work.py"]):
        assert command(environment, "run", *words, cwd=tmp_path).returncode == 7
    missing = command(environment, "run", "missing.py", cwd=tmp_path)
    assert missing.returncode == 1 and "no script or program 'missing.py'" in missing.stderr


def test_run_says_what_would_keep_the_script_from_finding_trainstream(monkeypatch):
    monkeypatch.setattr(run.importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(run.errors.TrainstreamError, match="entry point"):
        run._variables(dict.fromkeys(run.config.KEYS), {})


@needs_extension
def test_run_under_torchrun_trains_and_reports_each_rank(environment, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(1024, 1024)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(2, 1024)).sum().backward()\n"
        "optimizer.step()\n"
    )
    settings = ["--device", "sim", "--vram", "64MiB", "--report", "run.json"]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "trainstream", "run", *settings, "train.py"],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stderr.count("steps=1") == 2, done.stderr
    assert [
        json.loads((tmp_path / name).read_text())["rank"] for name in ("run.json", "run.rank1.json")
    ] == [0, 1]
    made = command(environment, "report", "run.json", cwd=tmp_path)
    assert made.returncode == 0 and "written: run.html" in made.stdout
    assert "Nothing moves: the run fits" in made.stdout


@needs_extension
def test_info_says_what_works(environment, tmp_path):
    done = command(environment, "info", "--json", XDG_CACHE_HOME=str(tmp_path))
    known = json.loads(done.stdout)
    assert done.returncode == 0 and known["works"]["simulated device (device:sim)"] == "yes"
    assert known["works"]["GPU"].startswith("yes" if known["profile"] else "no: ")


@needs_extension
def test_info_measures_the_simulated_device(environment, tmp_path):
    done = command(environment, "info", "--device", "sim", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0 and "large copies, both ways at once" in done.stdout


def test_bench_lists_scripts_and_says_where_there_are_none(capsys, monkeypatch, tmp_path):
    status, out, _ = call(capsys, "bench")
    assert status == 0 and "main_job" in out and "train_worker" not in out
    monkeypatch.setattr(bench, "_FOLDER", tmp_path)
    status, _, stderr = call(capsys, "bench")
    assert status == 1 and "scripts of a clone" in stderr


def test_bench_runs_a_script_with_its_arguments(environment):
    done = command(environment, "bench", "optimizer-engines", "--help")
    assert done.returncode == 0 and "optimizer_engines.py" in done.stdout
    assert command(environment, "bench", "optimizer_engines", "--nonsense").returncode == 1


QWEN2 = {"model_type": "qwen2", "tie_word_embeddings": False}
BIG = {
    **QWEN2,
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
SMALL = {
    **QWEN2,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
TINY = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (BIG, 7_615_616_512),
        # Of transformers 5 and its own default configurations, by AutoModelForCausalLM on "meta".
        ({**TINY, "model_type": "llama"}, 2_725_632),
        ({**TINY, "model_type": "qwen3", "head_dim": 128}, 3_316_224),
        ({**TINY, "model_type": "gemma2", "head_dim": 64}, 2_471_168),
        ({**TINY, "model_type": "mixtral", "num_local_experts": 4}, 7_594_752),
        ({**TINY, "model_type": "phi"}, 2_191_400),
        (
            {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12}
            | {"vocab_size": 50257, "n_positions": 1024},
            124_439_808,
        ),
    ],
)
def test_parameters_are_counted_exactly(config, parameters):
    assert model_shape.shape_of(config).parameters == parameters


@pytest.mark.parametrize(("config", "measured"), [(BIG, 62.7e9), (SMALL, 11.7e9)])
def test_stock_peak_is_within_a_tenth_of_what_was_measured(config, measured):
    """One H200, 8192 tokens, checkpointing, everything in bfloat16, fused AdamW."""
    job = estimate.Job(model_shape.shape_of(config), tokens=8192, length=2048)
    assert estimate.need(job).peak == pytest.approx(measured, rel=0.1)


def test_more_of_anything_needs_more():
    job = estimate.Job(model_shape.shape_of(SMALL), tokens=8192, length=2048)
    peak = estimate.need(job).peak
    for change in ({"tokens": 16384}, {"dtype": "float32"}, {"checkpointing": False}):
        assert estimate.need(dataclasses.replace(job, **change)).peak > 1.2 * peak
    assert estimate.need(dataclasses.replace(job, optimizer="host")).peak < peak


def fit_json(capsys, tmp_path, config, *words) -> dict:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    rates = "--to-device 50 --to-host 50 --host-memory 150 --tflops 500 --ram 200GiB".split()
    status, out, stderr = call(capsys, "fit", tmp_path, "--tokens", 8192, "--json", *rates, *words)
    assert status == 0, stderr
    return json.loads(out)


@needs_extension
def test_fit_pages_less_under_a_larger_budget_and_nothing_where_all_fits(capsys, tmp_path):
    made = [fit_json(capsys, tmp_path, BIG, "--vram", f"{gib}GiB") for gib in (22, 30, 50, 80)]
    paged = [sum(one["plan"]["paged"].values()) for one in made]
    assert paged == sorted(paged, reverse=True) and paged[0] > 40e9 and paged[-1] == 0
    assert [one["limit"] for one in made[:1] + made[-1:]] == ["the link to the device", "computing"]
    for one in made:
        assert one["step_seconds"] == max(one["seconds"].values())
        stays = one["need_bytes"]["weights"] - one["plan"]["paged"]["weights"]
        assert stays + one["plan"]["inflight"] < one["plan"]["device_bytes"]


@needs_extension
def test_fit_of_a_whole_paged_model_moves_9_bytes_a_parameter_in_and_6_out(capsys, tmp_path):
    """Weights twice and, where the update is not late, a third time; moments once."""
    made = fit_json(capsys, tmp_path, SMALL, "--vram", "4.37GiB")
    count = made["parameters"]
    late = 4.37 * 2**30 / 4 / (2 * count)
    come = (4 + 2 * (1 - late) + 4) * count
    assert made["moved_bytes"]["to_device"] == pytest.approx(come, rel=0.001)
    assert made["moved_bytes"]["to_host"] == pytest.approx(6 * count, rel=0.001)
    assert made["seconds"]["the link to the device"] == pytest.approx(come / 50e9, rel=0.001)


def test_late_updates_are_those_that_steps_have():
    from trainstream import _foreach

    assert estimate._LATE_IN_BUDGET == _foreach._LATE_IN_BUDGET


def rows_of(name: str) -> dict:
    content = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
    return {row["name"]: row["value"] for row in content["rows"]}


# Of one H200: its link while copies go both ways (49.2 GB/s), the stock step of the same run. Where
# the program's own thread paces a step (1.26 B parameters: 334 ms of 440) fit knows nothing of it.
@needs_extension
@pytest.mark.parametrize(
    ("config", "run", "tolerance"),
    [
        (BIG, "2026-12-01-main-job-7.62b", 0.1),
        (SMALL, "2026-12-01-main-job-1.26b", 0.15),
    ],
)
def test_fit_foretells_measured_steps_and_bytes(capsys, tmp_path, config, run, tolerance):
    measured = rows_of(run)
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = "--ram 100GiB --to-device 49.2 --to-host 49.2 --host-memory 177 --json".split()
    words += ["--vram", int(measured["budget"])]
    words += ["--stock-step", measured["stock step, median after 2"]]
    status, out, stderr = call(capsys, "fit", tmp_path, "--tokens", 8192, *words)
    assert status == 0, stderr
    made = json.loads(out)
    step = measured["step, median after 2"]
    assert made["foretold_seconds"] == pytest.approx(step, rel=tolerance)
    assert made["step_seconds"] <= made["foretold_seconds"]
    assert sum(made["phase_seconds"].values()) == pytest.approx(made["foretold_seconds"])
    come, gone = measured["restored in the last step"], measured["evicted in the last step"]
    assert made["moved_bytes"]["to_device"] == pytest.approx(come, rel=0.1)
    assert made["moved_bytes"]["to_host"] == pytest.approx(gone, rel=0.1)
    assert made["need_bytes"]["peak"] == pytest.approx(measured["stock peak allocated"], rel=0.1)


@needs_extension
def test_fit_foretells_nothing_that_it_has_no_rates_for(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    words = ["fit", tmp_path, "--tokens", 8192, "--ram", "100GiB", "--vram", "4.37GiB"]
    if not torch.cuda.is_available():
        assert "Foretold" not in call(capsys, *words, "--tflops", 400)[1]
    words += "--tflops 400 --to-device 50 --to-host 50".split()
    assert "Foretold, phase by phase: " in call(capsys, *words)[1]
    assert "Foretold" not in call(capsys, *words, "--optimizer", "host")[1]


@needs_extension
def test_fit_that_cannot_be_is_refused_with_the_arithmetic(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BIG))
    for words, text in (
        (["--vram", "8GiB", "--ram", "200GiB"], "Raise vram by at least"),
        (["--vram", "24GiB", "--ram", "8GiB"], "Raise ram by at least"),
    ):
        status, _, stderr = call(capsys, "fit", tmp_path, "--tokens", 8192, *words)
        assert status == 1 and text in stderr and len(stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no network is asked"),
        ("{", "it is no JSON"),
        ("[]", "no JSON object"),
        ('{"model_type": "llama"}', "it has no hidden_size or n_embd"),
        (json.dumps({**TINY, "hidden_size": -1}), "hidden_size is -1"),
        (json.dumps({**TINY, "is_encoder_decoder": True}), "only plain decoders"),
    ],
)
def test_fit_of_what_is_no_model_is_one_clear_line(capsys, tmp_path, content, words):
    model = "some/model"
    if content is not None:
        model = tmp_path / "config.json"
        model.write_text(content)
    status, _, stderr = call(capsys, "fit", model, "--tokens", 8)
    assert status == 1 and words in stderr and len(stderr.splitlines()) == 1


def test_fit_of_an_unknown_model_type_says_what_it_assumed(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "newest"}))
    status, out, _ = call(capsys, "fit", tmp_path, "--tokens", 8)
    assert status == 0 and "'newest' is not known: counted as Llama's" in out


def test_tables_without_rich_are_plain_text(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    console.Console(pretty=True).table("sizes", ("", "a"), [("weights", "1"), ("all", "[b]2")])
    assert capsys.readouterr().out == "sizes\n           a\n  weights  1\n  all      [b]2\n"


def test_tables_in_a_terminal_are_drawn_by_rich(environment):
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "trainstream", "bench"]
    process = subprocess.Popen(words, env=environment, stdout=theirs, cwd=ROOT)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # The other end is closed.
        pass
    os.close(ours)
    assert process.wait() == 0 and "│".encode() in shown


@needs_extension
def test_fit_names_a_limit_only_where_every_term_is_known(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    words = ["fit", tmp_path, "--tokens", 8192, "--ram", "100GiB", "--tflops", 400]
    assert "Computing limits" in call(capsys, *words, "--vram", "20GiB")[1]
    if not torch.cuda.is_available():
        out = call(capsys, *words, "--vram", "6GiB")[1]
        assert "limits" not in out and "host memory (--host-memory)" in out
