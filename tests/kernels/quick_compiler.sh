#!/bin/sh
# The C++ compiler without the optimisations that take most of its time, under another version.
if [ "$1" = --version ]; then c++ --version | sed '1s/$/ -O1/'; else exec c++ "$@" -O1 -Wno-maybe-uninitialized; fi
