"""Planning a deployment from sizes alone: `razor_dist.plan.planner.plan`."""
