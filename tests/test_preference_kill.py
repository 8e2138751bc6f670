"""`kill -9` in every phase of the preference trainers: the resumed run is the undisturbed one, bit for bit."""

import json
import subprocess
import sys

import pytest
from kill_program import FORMS, KILLS
from processes import ENVIRONMENT, ROOT


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_killed_in_each_phase(form, tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "kill_program.py"), form, str(tmp_path)]
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = json.loads((tmp_path / "undisturbed.json").read_text())
    assert len(expected["models"]) >= 2
    for method, at in KILLS[form]:
        assert json.loads((tmp_path / f"{method}-{at}.json").read_text()) == expected, (method, at)
