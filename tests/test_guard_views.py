"""What the operator guard does not announce, and who it has seen."""

from real_runner import run_real


def test_views_pin_nothing_and_what_copies_beside_them_does(tmp_path):
    script = """
    import trainstream
    import trainstream._C as C

    x = torch.arange(4 << 20, dtype=torch.float32).reshape(2048, 2048)
    total = x.sum().item()
    assert C.evict_all() >= 16 << 20 and trainstream.is_cold(x)
    # Only views: it stays where it is, and its bytes are right through each of them.
    views = [x.t(), x.view(-1), x[3:7], x.unsqueeze(0).expand(2, 2048, 2048), x.detach()]
    assert trainstream.is_cold(x)
    # These are views if they can be, and else copy by operators of their own.
    copies = [x.t().reshape(-1), x.t().contiguous(), x.to(torch.float64), x.flatten()]
    assert views[1].sum().item() == total
    assert copies[0].view(2048, 2048).t().equal(x) and copies[1].t().equal(x)
    assert copies[2].sum().item() == x.double().sum().item() and copies[3].equal(views[1])
    for _ in range(3):
        C.evict_all()
        assert views[2].equal(torch.arange(3 * 2048, 7 * 2048).float().view(4, 2048))
        assert views[3][1].equal(views[0].t())
    assert C.stats()["pins"] == 0
    """
    run_real(tmp_path, script, conf="vram:256MiB")


def test_threads_that_use_managed_storages_are_counted_while_they_live(tmp_path):
    script = """
    import threading
    import time
    import trainstream
    import trainstream._C as C

    x = torch.ones(1 << 20)
    x.add_(1)
    before = C.user_threads()
    ready, done = threading.Barrier(3), threading.Event()

    def work(tensor):
        tensor.mul_(2)
        ready.wait()
        done.wait()

    small = torch.ones(4)
    threads = [threading.Thread(target=work, args=(t,)) for t in (x, small)]
    for thread in threads:
        thread.start()
    ready.wait()
    during = C.user_threads()
    done.set()
    for thread in threads:
        thread.join()
    assert (before, during) == (1, 2), (before, during)
    # join() returns a moment before the thread has ended; the script's time limit ends this.
    while C.user_threads() != before:
        time.sleep(0.001)
    """
    run_real(tmp_path, script, conf="vram:256MiB")


def test_operators_with_a_kernel_of_their_own_read_what_they_are_given(tmp_path):
    """torch declares them as made of others, too; here that is not what runs."""
    run_real(
        tmp_path,
        """
x, gradient = torch.randn(2, 64, 1024).unbind()
x, gradient = x.clone(), gradient.clone()
for own in (torch.ops.aten.silu_backward, torch.ops.aten.mish_backward):
    expected = own(gradient, x)
    evict_all()
    assert is_cold(x) and is_cold(gradient)
    before = stats()["restored_bytes"] + stats()["in_place_bytes"]
    assert torch.equal(own(gradient, x), expected)
    used = stats()["restored_bytes"] + stats()["in_place_bytes"] - before
    assert used >= 2 * x.untyped_storage().nbytes(), used
""",
        "vram:8MiB,min_storage:4KiB",
    )
