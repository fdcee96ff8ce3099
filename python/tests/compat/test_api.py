"""Every name that the original's module has is there, takes the same arguments, and is on the page of the documentation."""

import inspect
import pathlib

import pytest

import mooncake
from compat import api, peer_flags
from mooncake import store as module
from mooncake.cli import flags, master_flags
from mooncake.store import MooncakeDistributedStore, environment

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "reference" / "mooncake-compat.md"


@pytest.mark.parametrize("name", api.MODULE)
def test_the_module_has_every_name(name):
    assert hasattr(module, name) or name == "_get_pyclient_from_wrapper"


@pytest.mark.parametrize("name", sorted(api.METHODS))
def test_a_method_takes_the_same_arguments(name):
    theirs = [each.strip() for each in api.METHODS[name].split(",") if each.strip()]
    ours = list(inspect.signature(getattr(MooncakeDistributedStore, name)).parameters.values())[1:]
    assert len(ours) == len(theirs), f"{ours} for {theirs}"
    for parameter, wanted in zip(ours, theirs):
        wanted_name, _, default = wanted.partition("=")
        if wanted_name.startswith("*"):
            assert parameter.kind is inspect.Parameter.VAR_POSITIONAL
            continue
        if not wanted_name.startswith("arg"):
            assert parameter.name == wanted_name
        if default:
            assert repr(parameter.default) == default, wanted
        elif name not in ("load_tensor_from_safetensor", "init_all"):  # the documentation of these has defaults
            assert parameter.default is inspect.Parameter.empty, wanted


def test_every_name_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    # The last two hand out objects of C++, and are not there.
    names = [*api.MODULE, *api.METHODS, "setup", "_get_pyclient_capsule", "_get_pyclient_from_wrapper"]
    missing = [name for name in names if f"`{name}`" not in text]
    assert not missing


def test_the_package_names_the_pool():
    assert mooncake.BufferPool is mooncake.RegisteredBufferPool is module.BufferPool


def test_enumerations_print_and_convert_as_the_original():
    assert [int(each) for each in module.SoftPinAction] == [0, 1, 2]
    assert str(module.SoftPinAction.ENABLE) == "SoftPinAction.ENABLE"
    assert repr(module.SoftPinAction.PRESERVE) == "<SoftPinAction.PRESERVE: 0>"
    assert module.ObjectDataType(2) is module.ObjectDataType.TENSOR is module.TENSOR
    assert int(module.TaskStatus.FAILED) == 2 and int(module.TaskStatus.SUCCESS) == 3
    assert module.FAILED is module.TaskStatus.FAILED
    assert int(module.ReplicaStatus.COMPLETE) == 3


@pytest.mark.parametrize("name", ["EngramStore", "EngramStoreConfig", "MooncakeDistributedNoFRegister"])
def test_what_there_is_not_says_so(name):
    with pytest.raises(NotImplementedError, match=name):
        getattr(module, name)()


# User report 62: engines name methods that a version lacks, and find out in production.
ENGINES = {
    "LMCache in process": "setup is_exist batch_get_into batch_get_buffer batch_put_from put_from put_parts register_buffer "
    "unregister_buffer get_hostname close",
    "LMCache lookup": "setup batch_is_exist close",
    "SGLang HiCache": "setup setup_dummy register_buffer put get is_exist batch_is_exist batch_put_from batch_get_into "
    "batch_put_from_multi_buffers batch_get_into_multi_buffers remove_all",
    "SGLang direct linker": "register_buffer batch_get_session_start batch_get_into_multi_buffer_ranges batch_get_session_end",
    "vLLM": "setup register_buffer batch_is_exist batch_put_from_multi_buffers batch_get_into_multi_buffers "
    "batch_get_replica_desc remove_all batch_get_into unregister_buffer close",
}


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_case_062_every_method_that_an_engine_names_is_there(engine):
    for name in ENGINES[engine].split():
        assert callable(getattr(MooncakeDistributedStore, name))
    for name in ("ReplicateConfig", "ObjectDataType", "bind_to_numa_node", "MooncakeHostMemAllocator"):
        assert hasattr(module, name)


FLAGS = {*peer_flags.MASTER, *peer_flags.CLIENT} - flags.OF_LIBRARIES - master_flags.WITHOUT_EFFECT
VARIABLES = environment.FOLLOWED | environment.NEEDLESS | set(environment.REFUSED) | {environment.BIND_ADDRESS}


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_every_flag_that_is_followed_or_refused_is_on_the_page(name):
    """Those without effect are warned of by name when they are given."""
    text = PAGE.read_text(encoding="utf-8")
    assert f"--{name}`" in text or f"--{name} " in text or any(
        f"--{start}*" in text and name.startswith(start) for start in ("dynamic_replication_", "help", "pod_")
    )


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_every_variable_that_means_something_is_on_the_page(name):
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")
