"""Data sets, their division among clients, and the cache of both (`open_client_data` is the way in)."""

from protofl_common.datasets.checks import check_data_settings
from protofl_common.datasets.clients import ClientData, open_client_data
from protofl_common.datasets.labelling import UNLABELLED
from protofl_common.datasets.raw import DataError

__all__ = ["UNLABELLED", "ClientData", "DataError", "check_data_settings", "open_client_data"]
