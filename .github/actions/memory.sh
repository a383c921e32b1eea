#!/usr/bin/env bash
# What action.yml runs: a command of actbench in this checkout and in that of the base, and one comment with both.
set -euo pipefail

kept=$(mktemp -d "${RUNNER_TEMP:-/tmp}/actbench.XXXXXX")
table=$kept/table.md
marker="<!-- actbench: $NAME -->"
mapfile -d '' words < <(python -c 'import os, shlex; print("\0".join(shlex.split(os.environ["COMMAND"])), end="\0")')

simulate() { # into a file, with the options before the script of run
  actbench "${words[0]}" --output "$1" "${words[@]:1}"
}

before=
if [[ -n ${BASE_SHA:-} ]]; then
  here=$(git rev-parse --show-prefix)
  git cat-file -e "$BASE_SHA^{commit}" 2>/dev/null || git fetch --quiet --depth 1 origin "$BASE_SHA"
  git worktree add --quiet --detach "$kept/base" "$BASE_SHA"
  # the base may not have the script yet, or may fail: then the comment has this checkout alone
  # a base that needs too much for --require-fit has a row all the same
  if [[ -d $kept/base/$here ]]; then (cd "$kept/base/$here" && simulate "$kept/before.jsonl") || true; fi
  if [[ -s $kept/before.jsonl ]]; then before=$kept/before.jsonl; fi
  git worktree remove --force "$kept/base"
fi

status=0
simulate "$kept/after.jsonl" || status=$?
if [[ ! -s $kept/after.jsonl ]]; then
  echo "::error title=actbench::the command stored no row: $COMMAND"
  exit "$((status ? status : 1))"
fi

limits=()
while IFS= read -r limit; do
  [[ -z ${limit// /} ]] || limits+=(--fail-on "$limit")
done <<<"${FAIL_ON:-}"
[[ ${#limits[@]} -eq 0 ]] || limits+=(--format github)

if [[ -n $before ]]; then
  actbench compare "$before" "$kept/after.jsonl" "${limits[@]}" --export-markdown "$table" || status=$?
else
  actbench report "$kept/after.jsonl" --title "This branch alone: there is nothing to compare with" --export-markdown "$table"
  if [[ ${#limits[@]} -gt 0 ]]; then
    unchecked="The limits of fail-on were not checked: the base has no row of this command."
    echo "::warning title=actbench::$unchecked"
    printf '\n%s\n' "$unchecked" >>"$table"
  fi
fi
{
  printf '%s\n## %s\n\n`actbench %s` (%s)\n\n' "$marker" "$NAME" "$COMMAND" "$ACTBENCH_DEVICE_PROFILE"
  sed 's/^## /### /' "$table"
} >"$kept/comment.md"
cat "$kept/comment.md" >>"${GITHUB_STEP_SUMMARY:-/dev/stdout}"
echo "table=$table" >>"${GITHUB_OUTPUT:-/dev/null}"

if [[ $COMMENT == true && -n ${PULL_REQUEST:-} ]]; then
  comments=repos/$GITHUB_REPOSITORY/issues/$PULL_REQUEST/comments
  # GitHub takes 65,536 characters: whole lines, since bytes would cut a character in two
  python - "$kept/comment.md" "$kept/body.md" <<'CUT'
import pathlib, sys

source, target = map(pathlib.Path, sys.argv[1:])
text = source.read_text(encoding="utf-8")
if len(text) > 60_000:
    text = text[: text.rindex("\n", 0, 60_000) + 1] + "\nThe rest is in the summary of the run.\n"
target.write_text(text, encoding="utf-8")
CUT
  own=$(MARKER=$marker gh api --paginate "$comments" --jq '.[] | select(.body | startswith(env.MARKER)) | .id' | head -n 1)
  if [[ -n $own ]]; then
    gh api --silent --method PATCH "repos/$GITHUB_REPOSITORY/issues/comments/$own" --field "body=@$kept/body.md"
  else
    gh api --silent --method POST "$comments" --field "body=@$kept/body.md"
  fi
fi
exit "$status"
