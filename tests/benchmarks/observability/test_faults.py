"""The faults name alerts that exist, and each says what must fire."""

import yaml

from benchmarks.observability.faults import FAULTS
from benchmarks.observability.prometheus import DEPLOY


def test_faults_name_alerts_that_exist() -> None:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    for fault in FAULTS:
        assert fault.must, fault.name
        assert fault.must | fault.may <= alerts
        assert not {"FaserAuditDiverged", "FaserAcceptanceCollapsed"} & (fault.must | fault.may)
