// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"os"

	"github.com/storage-controller/storage-controller/csiclient"
)

// WriteTerminationMessage writes the error with which a process ends to file, from which the kubelet reads the termination message of a
// container. The file exists only in a container. The kubelet shows at most 4096 bytes.
func WriteTerminationMessage(file string, err error) {
	f, openErr := os.OpenFile(file, os.O_WRONLY|os.O_TRUNC, 0)
	if openErr != nil {
		return
	}
	defer f.Close()
	message := err.Error()
	if errors.Is(err, csiclient.ErrConnectionLost) {
		message = "Lost connection to CSI driver, exiting" // the text of the reference sidecars
	}
	fmt.Fprintln(f, message)
}
