"""HtFLlib's options are those of its own command line, whichever it has.

A server of a stand-in reads some of them.
"""

from pathlib import Path

import pytest

from protofl_common.experiment.settings import Settings, default_run_config
from tests.bench import htfllib

MAIN = """
import a_package_that_nobody_has
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-fs", "--few_shot", type=int, default=3)
    parser.add_argument("-tc", "--top_cnt", type=int, default=100,
                        help="For auto_break")
    parser.add_argument("-mfn", "--models_folder_name", type=str, default="")
    parser.add_argument("-lr", "--local_learning_rate", type=float, default=0.5)
    parser.add_argument("--of_a_later_version", action="store_true")
    run(parser.parse_args())
"""
SERVER = """
class FedProto:
    def __init__(self, args, times):
        assert (args.few_shot, args.top_cnt, args.models_folder_name) == (3, 100, "")
        assert args.of_a_later_version is False
        assert args.local_learning_rate == 0.05, "a run's own setting"
        self.Budget = [float(args.num_clients), float(args.global_rounds), args.lamda]

    def train(self):
        pass
"""


@pytest.mark.slow
def test_options_that_nobody_lists_have_their_defaults(tmp_path: Path) -> None:
    """The stand-in's seconds of a round are its rounds and the run's λ."""
    library = tmp_path / "library"
    servers = library / "system" / "flcore" / "servers"
    servers.mkdir(parents=True)
    (servers / "serverproto.py").write_text(SERVER)
    (library / "system" / "main.py").write_text(MAIN)
    settings = Settings.from_run_config(default_run_config() | {"fedproto.lambda": 0.25})

    seconds = htfllib.seconds(library, tmp_path, settings, clients=2, rounds=4)

    assert seconds == [4.0, 0.25]


def test_a_folder_without_the_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"main\.py"):
        htfllib.defaults(tmp_path)
