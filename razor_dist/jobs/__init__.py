"""Jobs: many items of work on engines of a Ray cluster or of this host, with stored results.

The author of a job writes a `razor_dist.jobs.task.Task`: plain data that can be pickled, with

- ``settings``: all that decides the results, plain JSON data; their hash guards the folder;
- ``engines``: ``{name: EngineConfig}``; an evaluation has an engine for each method;
- ``items()``: a list of ``Item(id, size, engine, data)``;
- ``run(llm, item)``: one item's result, plain JSON data, or a generator that returns it and yields
  a `PartResult` for each part to be stored at once. It is called in a process beside the engine's
  rank 0, with a `razor_dist.LLM` of its own.

``job.run_job(task, config, folder)`` runs the task by a `JobConfig`; ``results.read_job(folder)``
returns the settings and the records. `job.run_task` opens the folder (`results`), skips finished
items, and `pool.run_items` hands the others to engines. An engine's failure costs its item an
attempt; a lost engine is replaced; after ``attempts`` the item is recorded as failed. `progress`
logs a line for each item. `ray_engine` makes engines of Ray actors, `host_engine` of processes; a
`task.ExternalEngineConfig` opens a model that another library runs.
"""
