// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import "errors"

func mount(string, string, bool, bool) error { return errors.New("--mount requires Linux") }
func unmount(string) error                   { return errors.New("--mount requires Linux") }
func growLoop(string) error                  { return nil }
func detachLoop(string) error                { return nil }
