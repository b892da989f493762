"""From the command line to a frozen config, and from a config to JSON."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    flags="REQUIRED JsonObject config_hash parse_args parse_cli plug_in reporting_errors resolve_path to_json",
)
