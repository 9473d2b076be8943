// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import "k8s.io/client-go/rest"

// Raw returns the body of a response. The error of [rest.Result.Raw] is "unknown" where that of Raw has the message and the reason of
// the API server.
func Raw(r rest.Result) ([]byte, error) {
	if err := r.Error(); err != nil {
		return nil, err
	}
	return r.Raw()
}
