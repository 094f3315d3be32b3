# SPDX-License-Identifier: Apache-2.0
"""The hash chain of a run: a record that was changed, removed, reordered or cut off is named."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from sporeloom.checkpoint.sharded import LocalTensor
from sporeloom.core.errors import ConfigError
from sporeloom.train import audit
from sporeloom.train.audit import choose, segments
from sporeloom.train.audit_chain import (
    FILE,
    Chain,
    ChainFile,
    digest,
    first_difference,
    has_same_layout,
    linked,
    part_digests,
    state_of_parts,
)

SETTINGS = {"train": {"steps": 6}}


def step(number, **more):
    return {"step": number, "configuration": digest(SETTINGS), "loss": 8.0 - number, **more}


def write(folder, records):
    file = ChainFile(folder, 0)
    for record in records:
        file.append(record)
    return file


@pytest.fixture
def run(tmp_path):
    """A run of 6 steps with states after 0, 2, 4 and 6."""
    states = {n: {"state": {"w": str(n)}} for n in (2, 4, 6)}
    write(
        tmp_path,
        [{"step": 0, "start": SETTINGS, "state": {"w": "0"}}, *(step(n, **states.get(n, {})) for n in range(1, 7))],
    )
    return tmp_path


def edited(folder, edit):
    lines = (folder / FILE).read_text().splitlines()
    edit(lines)
    (folder / FILE).write_text("\n".join(lines) + "\n")
    return Chain.read(folder).problems


def test_an_honest_chain_has_no_problems_and_a_head(run):
    chain = Chain.read(run)
    assert chain.problems == []
    assert len(chain.steps()) == 6 and len(chain.starts()) == 1
    assert chain.head == json.loads((run / FILE).read_text().splitlines()[-1])["hash"]


def test_a_changed_record_is_named(run):
    def edit(lines):
        lines[3] = lines[3].replace('"loss": 5.0', '"loss": 4.5')

    (problem,) = edited(run, edit)
    assert problem == f"{run / FILE}:4: step 3: the record was changed: its hash is not that of its content"


def test_a_changed_record_with_a_new_hash_breaks_the_link_after_it(run):
    def edit(lines):
        record = json.loads(lines[3])
        record["loss"] = 4.5
        lines[3] = json.dumps(
            linked({k: v for k, v in record.items() if k not in ("previous", "hash")}, record["previous"])
        )

    (problem,) = edited(run, edit)
    assert problem.startswith(f"{run / FILE}:5: step 4: does not follow the record before it")


def test_a_missing_record_is_named(run):
    (problem,) = edited(run, lambda lines: lines.pop(3))
    assert problem.startswith(f"{run / FILE}:4: step 4:") and "step 3 is missing" in problem


def test_the_missing_first_record_is_found(run):
    problems = edited(run, lambda lines: lines.pop(0))
    assert any("records before it are missing" in problem for problem in problems)


def test_reordered_records_are_named(run):
    problems = edited(run, lambda lines: lines.insert(3, lines.pop(4)))
    assert any("step 3: does not follow" in problem and "reordered" in problem for problem in problems)


def test_a_line_that_is_cut_off_is_named(run):
    def edit(lines):
        lines[-1] = lines[-1][:40]

    assert edited(run, edit) == [f"{run / FILE}:7: not a record; it was cut off or edited"]


def test_a_step_of_another_configuration_is_named(run):
    write(run, [{"step": 0, "start": SETTINGS}, step(1), {**step(2), "configuration": "0" * 64}])
    assert "its configuration is not that of the start" in Chain.read(run).problems[0]


def test_a_run_without_a_chain_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--audit-every"):
        Chain.read(tmp_path)


def test_a_resumed_run_takes_back_later_records_and_continues(run):
    file = ChainFile(run, 4)
    file.append({"step": 4, "start": SETTINGS, "state": {"w": "4"}})
    file.append(step(5))
    chain = Chain.read(run)
    assert chain.problems == [] and [record["step"] for record in chain.records] == [0, 1, 2, 3, 4, 4, 5]


def test_stretches_lie_between_states_that_are_there(run):
    chain = Chain.read(run)
    assert [(s.first, s.last) for s in segments(chain, [2, 4, 6])] == [(0, 2), (2, 4), (4, 6)]
    assert [(s.first, s.last) for s in segments(chain, [4])] == [(0, 4), (4, 6)]


def test_a_restart_with_other_settings_inside_leaves_a_stretch_out(run):
    other = {"train": {"steps": 8}}
    file = ChainFile(run, 4)
    file.append({"step": 4, "start": other, "state": {"w": "4"}})
    for number in (5, 6):
        file.append({**step(number), "configuration": digest(other), "state": {"w": str(number)}})
    chain = Chain.read(run)
    assert chain.problems == []
    assert [(s.first, s.last) for s in segments(chain, [2, 6])] == [(0, 2)]
    again = segments(chain, [2, 4, 6])
    assert [(s.first, s.last) for s in again] == [(0, 2), (2, 4), (4, 6)]
    assert again[1].settings == SETTINGS and again[2].settings == other


def test_the_choice_follows_from_the_seed(run):
    found = segments(Chain.read(run), [2, 4, 6])
    assert choose(found, 2, 5) == choose(found, 2, 5)
    assert choose(found, 9, 5) == found


def test_the_hash_of_a_tensor_is_that_of_its_slices():
    whole = np.arange(8, dtype=np.float32).reshape(2, 4)
    of_ranks = [part_digests({"w": LocalTensor(whole[:, i : i + 2], (0, i), whole.shape)}) for i in (0, 2)]
    state = state_of_parts(of_ranks)
    assert state_of_parts(of_ranks[::-1]) == state
    whole[1, 3] = np.nextafter(whole[1, 3], np.float32(9))
    other = state_of_parts([part_digests({"w": LocalTensor(whole[:, i : i + 2], (0, i), whole.shape)}) for i in (0, 2)])
    assert first_difference(state, other) == "w" and first_difference(state, state) is None


def test_the_checksum_of_a_tensor_is_the_same_in_every_layout():
    whole = np.arange(8, dtype=np.float32).reshape(2, 4)

    def state_of(dim):
        starts = [(0, 0), (1, 0)] if dim == 0 else [(0, 0), (0, 2)]
        slices = np.split(whole, 2, axis=dim)
        parts = zip(slices, starts, strict=True)
        return state_of_parts([part_digests({"w": LocalTensor(each, start, whole.shape)}) for each, start in parts])

    rows, columns = state_of(0), state_of(1)
    assert rows != columns and first_difference(rows, columns) is None
    assert has_same_layout(rows, rows) and not has_same_layout(rows, columns)
    whole[1, 3] = np.nextafter(whole[1, 3], np.float32(9))
    assert first_difference(rows, state_of(1)) == "w" and first_difference(rows, state_of(0)) == "w"
    content, layout, sha256 = rows["w"].split("-")
    assert first_difference(rows, {"w": f"{content}-{layout}-{sha256[::-1]}"}) == "w"  # SHA-256 in the same layout


def test_a_start_with_another_state_than_the_step_had_is_a_difference(run):
    file = ChainFile(run, 4)
    file.append({"step": 4, "start": SETTINGS, "state": {"w": "4"}})
    assert list(Chain.read(run).changed_starts()) == []
    file.append({"step": 4, "start": SETTINGS, "state": {"w": "changed"}})
    chain = Chain.read(run)
    assert chain.problems == []
    (problem,) = chain.changed_starts()
    assert "step 4, tensor w: the run was resumed with another content" in problem
    assert chain.states()[4] == {"w": "4"}  # checkpoints are compared with what was saved


def test_a_checkpoint_without_a_recorded_state_is_not_verified(run, monkeypatch):
    manifest = SimpleNamespace(step=3)
    monkeypatch.setattr(audit, "checkpoints", lambda folder: [folder / "step-00000003"])
    monkeypatch.setattr(audit, "read_manifest", lambda path: manifest)
    monkeypatch.setattr(audit, "state_of_checkpoint", lambda path, manifest: {"w": "3"})
    sound, differences, (unknown,) = audit.verify_checkpoints(Chain.read(run), run)
    assert (sound, differences) == ([], []) and "was not recorded" in unknown
    manifest.step = 8
    monkeypatch.setattr(audit, "checkpoints", lambda folder: [folder / "step-00000008"])
    sound, (difference,), unknown = audit.verify_checkpoints(Chain.read(run), run)
    assert (sound, unknown) == ([], []) and "no record of step 8" in difference
