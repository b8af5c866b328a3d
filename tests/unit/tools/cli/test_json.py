"""``--json``: what each command prints is an object of the schema that the documents have."""

import json

import jsonschema

from protofl_common.runs.events import Event, Failed, Finished, RoundDone
from protofl_common.simulation import grid
from protofl_common.tools.cli import COMMANDS, main
from tests.support.commands import SCHEMA, json_printed, parsers_of
from tests.support.fakes import row


def test_every_command_with_the_option_has_a_part_of_the_schema():
    """The schema has a definition for each such command, and one for each event of a run."""
    able = set()
    for name in COMMANDS:
        if any("--json" in parser.format_help() for parser in parsers_of(name)):
            able.add(name)
    defined = {name.split()[0] for name in SCHEMA["$defs"]}
    parts = {part["$ref"].rpartition("/")[2].split()[0] for part in SCHEMA["oneOf"]}

    assert able == defined & set(COMMANDS)
    assert able == parts

    events = {event.__name__ for event in Event.__subclasses__()}

    assert set(SCHEMA["$defs"]["run"]["properties"]["event"]["enum"]) == events


def test_lists_and_findings_follow_the_schema(tmp_path, capsys):
    assert json_printed(capsys, "runs", str(tmp_path))["runs"] == []
    assert json_printed(capsys, "list", "partitions").keys() == {"command", "format", "partitions"}
    assert len(json_printed(capsys, "list")) == 9  # seven lists, the command and the format
    assert json_printed(capsys, "doctor")["findings"]
    assert json_printed(capsys, "site", "check", "--node-config", 'site-name="north"')["findings"]


def test_what_a_site_keeps_is_told_with_its_size_and_places(tmp_path, capsys):
    """The site keeps a model of ten bytes of one run, and has no caches."""
    state = tmp_path / "first" / "clients" / "north"
    state.mkdir(parents=True)
    (state / "model.safetensors").write_bytes(bytes(10))
    node = f'site-name="north" state-dir="{tmp_path}" cache-dir="{tmp_path / "cache"}"'
    first, caches = json_printed(capsys, "site", "status", "--node-config", node)["kept"]

    assert first == {"name": "first", "bytes": 10, "paths": [str(state)]}
    assert caches == {"name": "caches/", "bytes": 0, "paths": []}


def test_a_run_is_a_line_for_each_event_and_quietly_for_its_end_alone(
    tmp_path, capsys, monkeypatch
):
    """What code of one's own prints is not among these lines."""

    def attempt(config, federation, on_event):
        """Stand in for a run: one round is done, and it ends well unless its name is "bad"."""
        print("what code of one's own prints")
        on_event(RoundDone(row(1, ["a"]), 1, 0.5))
        end = Finished(tmp_path, {"rounds": 1}, "alone 50.0 %; 3 kB exchanged", "")
        if config["run-name"] == "bad":
            end = Failed("SettingsError", "a reason")
        on_event(end)
        return end if isinstance(end, Failed) else tmp_path

    def lines(*words):
        """Return the events of ``protofl run --json``, each of which follows the schema."""
        main(["run", *words, "--json"])
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for event in events:
            jsonschema.validate(event, SCHEMA)
        return events

    monkeypatch.setattr(grid, "attempt", attempt)
    values = {"row": row(1, ["a"]), "rounds": 1, "seconds-left": 0.5, "algorithm": ""}
    values["task"] = "single-label"
    done = {"event": "RoundDone", **values}
    values = {"folder": str(tmp_path), "summary": {"rounds": 1}, "report": ""}
    end = {"event": "Finished", **values, "result": "alone 50.0 %; 3 kB exchanged"}

    assert lines("rounds=1") == [done, end]
    assert lines("rounds=1", "--quiet") == [end]

    failed = {"event": "Failed", "kind": "SettingsError", "text": "a reason", "traceback": ""}

    assert lines("run-name=bad") == [done, failed]
    assert lines("run-name=bad", "--quiet") == [failed]
