"""The lines that a run prints."""

from pathlib import Path

from server_app.callbacks.screen import final_table
from tests.support.harness import run_config, run_federation


def test_the_result_names_no_data_set_that_sites_with_own_data_did_not_use(tmp_path: Path) -> None:
    summary = run_federation(run_config(tmp_path, algo="local", rounds=1), clients=2).summary
    assert "Local on digit-domains after 1 rounds" in final_table(summary)
    summary["partition"] = "own"
    assert "Local on the sites' own data after 1 rounds" in " ".join(final_table(summary).split())
