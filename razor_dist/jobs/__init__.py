"""Jobs: many items of work on engines of a Ray cluster, with results that survive anything.

The author of a job writes a `razor_dist.jobs.task.Task`: plain data that can be pickled, with

- ``settings``: all that decides the results, plain JSON data; their hash guards the folder;
- ``engines``: ``{name: EngineConfig}``, for an evaluation one for each method;
- ``items()``: a list of ``Item(id, size, engine, data)``;
- ``run(llm, item)``: one item's result, plain JSON data, or a generator that returns it and yields
  a `PartResult` for each part that is to be kept at once. It is called in a process beside the
  engine's rank 0, with a `razor_dist.LLM` of its own.

``job.run_job(task, config, folder)`` runs it as a `JobConfig` says; ``results.read_job(folder)``
returns the settings and the records. In between `job.run_task` opens the folder (`results`), skips
what it holds, and has `pool.run_items` hand the rest to engines. An engine that
fails costs its item an attempt; one that is lost is opened anew; after ``attempts`` the item is
recorded as failed. `progress` logs a line for each. `ray_engine` makes engines of Ray actors,
`host_engine` of processes; a model that another library runs is an engine whose settings are a
`task.ExternalEngineConfig`, which opens it.
"""
