# make test: all that must hold before a change lands. make demo: a run that loses and gains workers.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
STDLIB := data/stdlib
DIGITS := data/digits

.PHONY: venv test lint unit data demo bench bench-elastic bench-scale soak ui clean

venv: $(INSTALLED)

# torch first and alone: where a package index offers several builds of it, the choice is made once.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'installing into .venv: some minutes, 2.3 GB'
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: venv
	$(BIN)/python -m pytest tests/unit

data: $(STDLIB) $(DIGITS)

$(STDLIB): | venv
	$(BIN)/python jobs/stdlib_text.py $@

$(DIGITS): | venv
	$(BIN)/python jobs/digits_data.py $@

demo: data
	$(BIN)/python jobs/demo.py

bench: venv
	$(BIN)/python tests/bench/cost.py

bench-elastic: venv
	$(BIN)/python tests/bench/recovery.py
	$(BIN)/python tests/bench/elastic.py

bench-scale: venv
	$(BIN)/python tests/bench/scale.py

soak: venv
	$(BIN)/python tests/bench/soak.py

ui: venv
	$(BIN)/mlflow ui --backend-store-uri sqlite:///runs/mlflow.db

clean:
	rm -rf runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
