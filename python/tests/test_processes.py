"""Signals, forks, threads, and the end of the interpreter. Each in a process of its own, since each may end it."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import patience
import tidepool
from support import freeze, state, until

#: A script that hangs is a failure, not a wait.
SCRIPT_WITHIN = 60 * patience.FACTOR


def run(script: str, masters: str, *, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", patience.PREAMBLE + textwrap.dedent(script), masters],
        capture_output=True,
        text=True,
        timeout=SCRIPT_WITHIN,
    )
    assert done.returncode == expect, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_fork_gets_an_error_and_may_connect_again(pool, key):
    """Tried without the check of the process: the child hangs."""
    out = run(
        f"""
        import gc, os, sys, tidepool
        store = tidepool.Store(sys.argv[1])
        node = tidepool.LocalNode(sys.argv[1], 1 << 20)
        store.put("{key}", b"x" * 100_000)
        value = store.get("{key}")
        pid = os.fork()
        if pid == 0:
            try:
                store.get("{key}")
            except tidepool.errors.Unavailable as error:
                assert "fork" in error.message, error
            assert store.closed and value == b"x" * 100_000
            again = tidepool.Store(sys.argv[1])
            assert again.get("{key}") == b"x" * 100_000
            store.close(); node.close()
            del store, node, value
            gc.collect()
            again.close()
            print("child", flush=True)
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0, status
        assert store.get("{key}") == b"x" * 100_000, "the parent goes on"
        print("parent")
        """,
        pool.masters,
    )
    assert out.split() == ["child", "parent"]


def test_a_fork_while_threads_are_busy(pool, key):
    run(
        f"""
        import os, sys, threading, tidepool
        store = tidepool.Store(sys.argv[1])
        store.put("{key}", b"x" * 10_000)
        stop = threading.Event()
        def read():
            while not stop.is_set():
                assert store.get("{key}") == b"x" * 10_000
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads: thread.start()
        for _ in range(10):
            pid = os.fork()
            if pid == 0:
                own = tidepool.Store(sys.argv[1])
                ok = own.get("{key}") == b"x" * 10_000
                os._exit(0 if ok else 1)
            _, status = os.waitpid(pid, 0)
            assert status == 0, status
        stop.set()
        for thread in threads: thread.join()
        """,
        pool.masters,
    )


def test_a_close_beside_calls_of_other_threads_ends(pool, key):
    """A close lets the interpreter go; who calls meanwhile must not wait for it with the interpreter in hand.
    Tried with the client's lock held while the interpreter is let go: hangs."""
    out = run(
        f"""
        import sys, threading, tidepool
        sys.setswitchinterval(1e-6)  # whoever lets the interpreter go waits until another thread has it
        for number in range(50):
            store = tidepool.Store(sys.argv[1])
            def ask():
                try:
                    while True:
                        store.closed, store.exist("{key}")
                except tidepool.errors.Unavailable:
                    pass
            def look():
                while not store.closed:
                    pass
            threads = [threading.Thread(target=each) for each in [ask, look] * 4]
            for thread in threads:
                thread.start()
            store.close()
            for thread in threads:
                thread.join()
        print("done")
        """,
        pool.masters,
    )
    assert out.split() == ["done"]


def test_a_close_of_a_node_beside_looks_at_it_ends(pool):
    """The same of a node that leaves. Tried with its lock held meanwhile: hangs."""
    out = run(
        """
        import sys, threading, tidepool
        for _ in range(5):
            node, over = tidepool.LocalNode(sys.argv[1], 1 << 20), threading.Event()
            def look():
                while not over.is_set():
                    node.ready()
            threads = [threading.Thread(target=look) for _ in range(4)]
            for thread in threads:
                thread.start()
            node.close()
            over.set()
            for thread in threads:
                thread.join()
            assert not node.ready()
        print("done")
        """,
        pool.masters,
    )
    assert out.split() == ["done"]


#: Calls that a Ctrl-C must end, made while the masters of `masters` answer.
INTERRUPTED = {
    "connect": "call = lambda: tidepool.Store(masters, connect_deadline=60)",
    "put": """store = tidepool.Store(masters, deadline=60)
call = lambda: store.put("k", b"v" * 100_000)""",
    "get": """store = tidepool.Store(masters, deadline=60)
call = lambda: store.get("k")""",
    "get_into": """store = tidepool.Store(masters, deadline=60)
target = bytearray(1000)
call = lambda: store.get_into("k", target)""",
    "mooncake_get_into": """store = mooncake.store.MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", masters) == 0
memory = tidepool.Memory(1000)
call = lambda: store.get_into("k", memory.address, 1000)""",
}
CALLER = """
for line in sys.stdin:
    print("calls", flush=True)
    try:
        call()
        print("returned", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
#: How soon, and in how many tries.
INTERRUPTED_S = 1.0
INTERRUPTS = 3


@pytest.mark.parametrize("name", sorted(INTERRUPTED))
def test_an_interrupt_ends_a_call_within_a_second(name):
    """Masters that are stopped accept connections and say nothing; each call has 60 s for that. The best of some tries counts: the
    host may have other things to do. Tried with a look at signals every ten seconds: fails, in every call of the table."""
    with tidepool.dev("64MiB") as own:
        # Whoever starts tests in the background has interrupts ignored, which children inherit.
        given = (
            "import signal, sys, tidepool, mooncake.store\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "masters = sys.argv[1]\n"
        )
        script = f"{given}{INTERRUPTED[name]}\nprint('open', flush=True)\n{CALLER}"
        child = subprocess.Popen(
            [sys.executable, "-c", script, own.masters],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MC_RPC_TIMEOUT_MS": "60000"},
        )
        try:
            assert child.stdout.readline() == "open\n"
            freeze(own.pid)
            took = []
            for _ in range(INTERRUPTS):
                child.stdin.write("\n")
                child.stdin.flush()
                assert child.stdout.readline() == "calls\n"
                until(lambda: state(child.pid) == "S", what="the call waits")
                began = time.monotonic()
                child.send_signal(signal.SIGINT)
                assert child.stdout.readline() == "interrupted\n"
                took.append(time.monotonic() - began)
            print(f"{name}: seconds until an interrupt is raised:", took)
            assert min(took) <= INTERRUPTED_S, took
        finally:
            os.kill(own.pid, signal.SIGCONT)
            child.kill()
            child.communicate()


def test_the_interpreter_ends_with_everything_open(pool, key):
    run(
        f"""
        import asyncio, sys, threading, tidepool
        store = tidepool.Store(sys.argv[1])
        node = tidepool.LocalNode(sys.argv[1], 1 << 20)
        view = memoryview(tidepool.Memory(100))
        store.put("{key}", b"x"); value = store.get("{key}")
        loop = asyncio.new_event_loop()
        pending = store.native.put_many(["{key}-2"], [bytes(8 << 20)], loop=loop)
        def busy():
            while True:
                store.exist("{key}")
        threading.Thread(target=busy, daemon=True).start()
        """,
        pool.masters,
    )


def test_what_is_lent_is_taken_back_when_the_interpreter_ends(pool):
    """Tried without leaving at the exit: fails."""
    run(
        """
        import sys, tidepool
        node = tidepool.LocalNode(sys.argv[1], 1 << 20, name="ends-with-its-process")
        """,
        pool.masters,
    )
    with pool.store() as store:
        assert "ends-with-its-process" not in {segment["name"] for segment in store.segments()}


def test_threads_share_a_store(pool, key):
    run(
        f"""
        import os, sys, threading, tidepool
        store = tidepool.Store(sys.argv[1])
        failures = []
        def work(me):
            try:
                target = bytearray(1 << 20)
                for round in range(20):
                    name, payload = f"{key}-{{me}}-{{round}}", os.urandom(1 << 20)
                    store.put(name, payload)
                    assert store.get_into(name, target) == 1 << 20 and target == payload
                    store.remove(name, force=True)
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not failures, failures
        """,
        pool.masters,
    )


def test_dev_leaves_nothing_behind():
    out = run(
        """
        import os, subprocess, sys, tidepool
        with tidepool.dev("64MiB") as pool:
            with pool.store() as store:
                store.put("a", b"x")
            print(pool.pid)
        """,
        "",
    )
    assert not alive(int(out))


def test_dev_goes_with_its_parent():
    """Killed, so that nothing of the parent's can tidy up."""
    out = run(
        """
        import os, signal, tidepool
        pool = tidepool.dev("64MiB")
        print(pool.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        "",
        expect=-signal.SIGKILL,
    )
    until(lambda: not alive(int(out)), what="the end of the child")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return state(pid) != "Z"


def test_the_program_is_there():
    done = subprocess.run(
        [sys.executable, "-c", "from tidepool._program import main; main()", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("tidepool"), done
    pytest.importorskip("tidepool")
