"""What a deployment would need, from sizes alone: `razor_dist.plan.planner.plan`."""
