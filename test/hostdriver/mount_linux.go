// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// mount bind-mounts path at target: a directory, or the loop device of a file. It succeeds if it is mounted.
func mount(path, target string, block, readonly bool) error {
	mounted, err := isMounted(target)
	if err != nil || mounted {
		return err
	}
	if block {
		if path, err = loopDevice(path); err != nil {
			return err
		}
		if err = os.WriteFile(target, nil, 0o640); err != nil {
			return err
		}
	} else if err = os.MkdirAll(target, 0o750); err != nil {
		return err
	}
	if err = syscall.Mount(path, target, "", syscall.MS_BIND, ""); err == nil && readonly {
		err = syscall.Mount("", target, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY, "")
	}
	return os.NewSyscallError("mount", err)
}

// unmount reverts mount. It succeeds if nothing is mounted at target. It removes only an empty file or directory.
func unmount(target string) error {
	mounted, err := isMounted(target)
	if err != nil {
		return err
	}
	if mounted {
		if err := syscall.Unmount(target, 0); err != nil {
			return os.NewSyscallError("umount", err)
		}
	}
	if err := os.Remove(target); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func isMounted(target string) (bool, error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	return strings.Contains(string(mounts), " "+filepath.Clean(target)+" "), err
}

// loopDevice returns the loop device of file. It attaches one if there is none.
func loopDevice(file string) (string, error) {
	if device, err := attachedLoop(file); device != "" || err != nil {
		return device, err
	}
	return losetup("--find", "--show", file)
}

// attachedLoop returns the loop device of file, or "".
func attachedLoop(file string) (string, error) {
	return losetup("--list", "--noheadings", "--output=NAME", "--associated", file)
}

// growLoop makes the size of the loop device of file, if it has one, that of the file.
func growLoop(file string) error {
	device, err := attachedLoop(file)
	if device != "" {
		_, err = losetup("--set-capacity", device)
	}
	return err
}

// detachLoop detaches the loop device of file, if it has one.
func detachLoop(file string) error {
	device, err := attachedLoop(file)
	if device != "" {
		_, err = losetup("--detach", device)
	}
	return err
}

func losetup(args ...string) (string, error) {
	out, err := exec.Command("losetup", args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("losetup %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}
