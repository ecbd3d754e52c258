# Two commands do everything on a fresh machine with Python 3.11 and make:
#   make demo   compares plain model.fit and three algorithms on real data, and names the report it wrote
#   make test   installs what the tests need and passes them
# and besides:
#   make docs   builds the documentation site, build/docs/index.html
#   make drills has workers of real runs fail at random moments: on each backend DRILLS=70 while they train, and
#               ANYTIME=30 from the start of their processes to their end

PYTHON ?= python3
DEMO ?=
PYTEST ?=
DRILLS ?= 70
ANYTIME ?= 30

.PHONY: demo test lint bench docs drills clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --constraint constraints.txt --editable '.[jax,demo]'
	touch $@

.venv-test/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/pip install --quiet torch==2.13.0
	.venv-test/bin/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

.venv-docs/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

demo: .venv/ready
	.venv/bin/choros demo $(DEMO)

test: .venv-test/ready
	PYTHON=.venv-test/bin/python bash tests/run.sh $(PYTEST)

lint: .venv-test/ready
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 .venv-test/bin/pyright --pythonpath .venv-test/bin/python
	.venv-test/bin/lint-imports

bench: .venv-test/ready
	.venv-test/bin/python benchmarks/table.py

docs: .venv-docs/ready
	.venv-docs/bin/python -m sphinx -W --keep-going -b html docs build/docs

drills: .venv-test/ready
	for backend in jax torch tensorflow; do \
	    .venv-test/bin/python drills/run.py --backend $$backend --number $(DRILLS) >drills/$$backend.json || exit 1; \
	    .venv-test/bin/python drills/anytime.py --backend $$backend --number $(ANYTIME) >drills/anytime-$$backend.json || exit 1; \
	    .venv-test/bin/python drills/jobs.py --backend $$backend --number $(DRILLS) >drills/jobs-$$backend.json || exit 1; \
	done
	.venv-test/bin/python drills/attack.py >drills/attack.json
	.venv-test/bin/python drills/soak.py >drills/soak.json
	.venv-test/bin/python drills/fuzz.py --inputs 1000000 >drills/fuzz.json

clean:
	rm -rf .venv .venv-docs .venv-test dist build docs/gallery choros-demo
