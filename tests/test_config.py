"""The configuration: what is accepted, and what the one error says."""

import pytest

from trainstream import config, errors
from trainstream.config import Amount, Config

pytestmark = pytest.mark.any_torch


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("8589934592", 2**33),
        ("8GiB", 2**33),
        ("8gib", 2**33),
        ("8G", 2**33),
        ("8GB", 8 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("0.1TB", 10**11),
        ("3KiB", 3072),
        ("2m", 2**21),
        ("100 MB", 10**8),
        ("12B", 12),
        ("9007199254740993", 2**53 + 1),  # A float would lose the last bit.
    ],
)
def test_size_is_read_exactly(text, size_bytes):
    assert config.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "0", "0.1", "1.5", "-1", "1e9", "8XB", "GiB", "9999999TiB"])
def test_what_is_no_size_is_refused(text):
    assert config.parse_size(text) is None


def test_empty_text_gives_the_defaults():
    assert config.parse_conf("") == Config() == config.parse_conf("  ")


def test_every_key_is_read():
    got = config.parse_conf(
        "vram:40%, ram:2GiB ,device:SIM,optimizer:hybrid,moments:bfloat16,min_storage:64KiB,"
        "activations:ALL,verify:1,report:out/run.json,log:debug"
    )
    assert got == Config(
        vram=Amount(percent=40),
        ram=Amount(2**31),
        device="sim",
        optimizer="hybrid",
        moments="bfloat16",
        activations="all",
        min_storage=2**16,
        verify=True,
        report="out/run.json",
        log="debug",
    )


def test_keywords_take_precedence_over_the_text():
    conf = config.parse_conf("vram:1GiB,device:sim")
    got = config.with_keywords(conf, {"vram": 2**20, "verify": True})
    assert got == Config(vram=Amount(2**20), device="sim", verify=True)


def test_amounts_are_encoded_for_the_extension():
    texts = ["auto", "4096", "40%", "100%"]
    amounts = [config.parse_conf(f"vram:{text}").vram for text in texts]
    assert [amount.encoded() for amount in amounts] == [0, 4096, -40, -100]
    assert [amount.resolved(1000) for amount in amounts] == [0, 4096, 400, 1000]
    assert [str(amount) for amount in amounts] == texts


def test_text_of_a_configuration_gives_it_back():
    text = "vram:40%,ram:1GiB,device:cuda,activations:.25,verify:1,report:a:b.json,log:info"
    conf = config.parse_conf(text)
    assert config.parse_conf(str(conf)) == conf
    assert (
        conf.activations == "0.25" == config.with_keywords(conf, {"activations": 0.25}).activations
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("varm:8GiB", ["unknown key 'varm'", "did you mean 'vram'", "min_storage"]),
        ("weights:auto", ["unknown key 'weights'", "known keys: vram, ram"]),
        ("vram:much", ["'much'", "'vram'", "auto", "8GiB", "percent"]),
        ("vram:0", ["'0'", "'vram'", "above 0"]),
        ("vram:0%", ["'0%'", "1% to 100%"]),
        ("vram:101%", ["'101%'", "1% to 100%"]),
        ("ram:-5", ["'-5'", "'ram'"]),
        ("min_storage:auto", ["'auto'", "'min_storage'", "a size above 0"]),
        ("device:tpu", ["'tpu'", "'device'", "auto, cuda, sim"]),
        ("optimizer:sgd", ["'sgd'", "'optimizer'", "stock, host, stream, hybrid, auto"]),
        ("activations:some", ["'some'", "'activations'", "auto, off, all", "fraction"]),
        ("activations:1.5", ["'1.5'", "'activations'", "from 0 to 1"]),
        ("verify:yes", ["'yes'", "'verify'", "0, 1"]),
        ("report:", ["'report'", "name of a file"]),
        ("log:loud", ["'loud'", "'log'", "off, warn, info, debug"]),
        ("vram", ["'vram'", "key:value"]),
        ("vram:1GiB,", ["''", "key:value"]),
        ("vram:1GiB,vram:2GiB", ["'vram'", "twice", "'1GiB'", "'2GiB'"]),
    ],
)
def test_bad_text_is_one_error_with_key_value_and_what_is_allowed(text, words):
    with pytest.raises(errors.ConfigError) as caught:
        config.parse_conf(text)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_bad_keyword_is_the_same_error():
    with pytest.raises(ValueError, match="unknown key 'budget'"):
        config.with_keywords(Config(), {"budget": 1})
