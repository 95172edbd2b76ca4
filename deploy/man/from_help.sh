#!/bin/sh
# usage: from_help.sh PROGRAM COMMAND...: hands what the program says to --help to the command.
set -eu
program=$1
shift
"$program" --help | "$@"
