"""Every example in the README and in docs/ runs, in order, in an empty directory."""

import pickle
import re
from pathlib import Path

import pytest

import forked_commands
from campaign import HANG_SECONDS
from netns import two_hosts
from rank_processes import run_ranks

pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IN_TEST_VLLM = {"vllm.md"}
"""Pages that need a vLLM: `make test-vllm` runs their examples."""
LINK = re.compile(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize(
    "page",
    [each for each in PAGES if each.name not in IN_TEST_VLLM],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_examples_of_a_page_run(page, tmp_path):
    """Python blocks of a page are one program; the shell blocks stand where they stand in it.

    What they start in turn are forks of a process that has imported the frameworks.
    """
    place, program = tmp_path / "empty", tmp_path / "program.py"
    place.mkdir()
    blocks = ["import os, subprocess"]
    for language, text in BLOCK.findall(page.read_text()):
        if language == "python":
            blocks.append(text)
        else:
            blocks.append(f"subprocess.run(['bash', '-e', '-c', {text!r}], check=True)")
    program.write_text("\n".join(blocks))
    found = [each for each in ("paddle", "torch") if f"import {each}" in program.read_text()]
    words = (0, forked_commands.__file__, "run_document", program, place)
    options = {"framework": [*found, "numpy"][0], "timeout": HANG_SECONDS}
    if "tcp://127.0.0.1:" in program.read_text():  # it listens at a port: in a network of its own
        with two_hosts() as hosts:
            run_ranks(*words, pickle.dumps(hosts.a).hex(), **options)
    else:
        run_ranks(*words, "", **options)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_readme_has_examples_at_all():
    assert len(BLOCK.findall((ROOT / "README.md").read_text())) >= 2
