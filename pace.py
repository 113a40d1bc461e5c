"""What a step costs on this machine, learnt from how long steps took.

Owns the estimate; knows nothing of requests or models, only counts. The scheduler asks it how much of a prompt can be
read in the time that others take to decode.
"""

import math


class Pace:
    """What a step costs here: milliseconds = fixed + a * requests that decode + b * tokens of prompts + c * tokens of
    drafts, fitted to the steps so far by recursive least squares with forgetting, on relative errors."""

    KEPT = 0.99  # of a step's weight, with every step after it
    UNKNOWN = 1e6  # variance of a cost that nothing is known of

    def __init__(self):
        self.costs = [0.0, 0.0, 0.0, 0.0]
        self.covariance = [[self.UNKNOWN * (i == j) for j in range(4)] for i in range(4)]
        self.has_drafted = False

    def observe(self, num_decoding: int, num_read: int, num_drafted: int, ms: float) -> None:
        self.has_drafted = self.has_drafted or num_drafted > 0
        features = 1 / ms, num_decoding / ms, num_read / ms, num_drafted / ms
        spread = [sum(c * x for c, x in zip(row, features)) for row in self.covariance]
        total = self.KEPT + sum(x * s for x, s in zip(features, spread))
        error = 1 - sum(cost * x for cost, x in zip(self.costs, features))
        self.costs = [cost + error * s / total for cost, s in zip(self.costs, spread)]
        # What no step has shown for long is not forgotten without end.
        kept = self.KEPT if max(self.covariance[i][i] for i in range(3 + self.has_drafted)) < self.UNKNOWN else 1
        self.covariance = [[(c - s * t / total) / kept for c, t in zip(row, spread)]
                           for row, s in zip(self.covariance, spread)]

    def tokens_beside(self, num_decoding: int) -> float:
        """Tokens of prompts that take as long as a step in which so many decode and nothing is read."""
        fixed, decoding, read, _ = self.costs
        return max(0.0, fixed + decoding * num_decoding) / read if read > 0 else math.inf

    def of_drafts(self, num_decoding: int) -> tuple[float, float]:
        """What a step costs for each of so many that decode, without drafts; and what each token of a draft adds. Zeros
        while that is not known."""
        fixed, decoding, _, drafted = self.costs
        return (max(0.0, fixed + decoding * num_decoding) / num_decoding, drafted) if drafted > 0 else (0.0, 0.0)
