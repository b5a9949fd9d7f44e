import json

import pytest

from child_processes import run_python


def modules_after(code):
    script = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = run_python(script, flags=("-W", "error"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return set(json.loads(done.stdout))


def test_importing_flyweight_imports_no_framework_and_prints_nothing():
    assert not modules_after("import flyweight") & {"torch", "paddle", "numpy", "rich", "click"}


def test_using_every_public_name_imports_no_framework():
    code = "import flyweight as fw\nfor name in fw.__all__: getattr(fw, name)"
    assert not modules_after(code) & {"torch", "paddle"}


def test_saving_and_loading_numpy_arrays_imports_no_framework(tmp_path):
    code = (
        "import numpy as np, flyweight as fw\n"
        f"fw.save({{'a': np.ones(3)}}, {str(tmp_path)!r}); "
        f"fw.load({str(tmp_path)!r}, into={{'a': np.zeros(3)}})"
    )
    assert not modules_after(code) & {"torch", "paddle"}


def test_a_script_that_keeps_its_own_engine_to_the_end_prints_nothing():
    code = """
import numpy as np, flyweight as fw
class Engine(fw.ModelEngine):
    def drop_cache(self): pass
engine = Engine({"w": np.zeros(2)})
"""
    assert not modules_after(code) & {"torch", "paddle"}


WHILE_IMPORTING = """
import os, sys, threading
import numpy as np, flyweight as fw
# Once before: what saves need is imported. setuptools, which paddle imports, changes sys.meta_path
# while other threads go through it, and they may miss a module that is there.
fw.save({"a": np.ones(3)}, sys.argv[2])
fw.save_state_dict({"a": np.ones(3)}, sys.argv[2])
os.fsync = lambda fd: None  # a slow disk only makes the saves fewer
thread = threading.Thread(target=__import__, args=(sys.argv[1],))
thread.start()
count = 0
while thread.is_alive():
    fw.save({"a": np.ones(3)}, sys.argv[2])
    fw.save_state_dict({"a": np.ones(3)}, sys.argv[2])
    count += 1
print(count, "saves")
"""


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("torch.distributed.tensor", marks=pytest.mark.check),
        pytest.param("paddle", marks=pytest.mark.campaign),
    ],
)
def test_saves_go_on_while_another_thread_imports(framework, tmp_path):
    done = run_python(WHILE_IMPORTING, framework, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 0
