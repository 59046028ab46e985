"""The autoscaler of Kubernetes, as far as deploy/kubernetes uses it: how many pods a HorizontalPodAutoscaler of autoscaling/v2
with metrics of pods asks for (kube-controller-manager: replica_calculator.go, horizontal.go). Pure; the caller has the clock.
"""

import math
from dataclasses import dataclass, field

# --horizontal-pod-autoscaler-tolerance and --horizontal-pod-autoscaler-sync-period, as they are by default.
TOLERANCE = 0.1
SYNC_SECONDS = 15


def quantity(text):
    """A quantity of Kubernetes as a number: 700m is 0.7."""
    text = str(text)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def wanted_by_metric(current, values, num_pods, target):
    """Pods that one metric asks for, by the values of those pods that have one; None if none has."""
    if not values:
        return None
    ratio = sum(values) / len(values) / target
    missing = num_pods - len(values)
    if missing == 0:
        return current if abs(1 - ratio) <= TOLERANCE else math.ceil(ratio * len(values) - 1e-9)
    # Who tells nothing is taken for what keeps the number from changing: full where less are wanted, idle where more are.
    values = values + [target if ratio < 1 else 0.0] * missing
    again = sum(values) / len(values) / target
    if abs(1 - again) <= TOLERANCE or (again > 1) != (ratio > 1):
        return current
    wanted = math.ceil(again * len(values) - 1e-9)
    return current if (wanted > current) != (again > 1) else wanted


@dataclass
class Autoscaler:
    """A HorizontalPodAutoscaler; its times are divided by `speed`."""

    spec: dict
    speed: float = 1
    recommended: list = field(default_factory=list)
    changes: list = field(default_factory=list)

    def targets(self):
        """The target of each metric, by name."""
        pods = [one["pods"] for one in self.spec["metrics"]]
        return {one["metric"]["name"]: quantity(one["target"]["averageValue"]) for one in pods}

    def decide(self, now, current, num_pods, values):
        """Replicas from now on. `values`: of each metric, those of the pods that have it."""
        wanted = self.stabilised(now, current, self.recommend(current, num_pods, values))
        wanted = min(max(self.limited(now, current, wanted), self.spec["minReplicas"]), self.spec["maxReplicas"])
        if wanted != current:
            self.changes.append((now, wanted - current))
        return wanted

    def recommend(self, current, num_pods, values):
        """The most that a metric asks for. Where one is not known, no fewer than there are."""
        asked = [wanted_by_metric(current, values[name], num_pods, target) for name, target in self.targets().items()]
        known = [one for one in asked if one is not None]
        if not known:
            return current
        return max(known) if len(known) == len(asked) else max(*known, current)

    def stabilised(self, now, current, wanted):
        """The least that was asked for lately where it would grow, the most where it would shrink."""
        self.recommended.append((now, wanted))
        behavior = self.spec["behavior"]
        lately = lambda rule: [count for at, count in self.recommended
                               if now - at <= behavior[rule]["stabilizationWindowSeconds"] / self.speed]
        return min(max(current, min(lately("scaleUp"))), max(lately("scaleDown")))

    def limited(self, now, current, wanted):
        """No faster than the policies allow, of which the one that allows most counts."""
        if wanted > current:
            return min(wanted, max(self.reach(now, current, "scaleUp", 1)))
        if wanted < current:
            return max(wanted, min(self.reach(now, current, "scaleDown", -1)))
        return wanted

    def reach(self, now, current, rule, sign):
        """How far each policy lets it come by now."""
        if self.spec["behavior"][rule]["selectPolicy"] != "Max":
            raise ValueError(f"{rule}: selectPolicy is not Max")
        for policy in self.spec["behavior"][rule]["policies"]:
            since = now - policy["periodSeconds"] / self.speed
            start = current - sum(change for at, change in self.changes if at > since)
            if policy["type"] == "Pods":
                yield start + sign * policy["value"]
            else:
                yield math.ceil(start * (1 + sign * policy["value"] / 100))
