// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// test returns the error of a failed test operation unless obj passes the tests of c.
func (c MetadataPatch) test(obj metav1.Object) error {
	if len(c.Tests) == 0 {
		return nil
	}
	have, err := decoded(obj)
	if err != nil {
		return err
	}
	for path, value := range c.Tests {
		want, err := decoded(value)
		if err != nil {
			return err
		}
		if !reflect.DeepEqual(lookup(have, path), want) {
			return &apierrors.StatusError{ErrStatus: metav1.Status{
				Status: metav1.StatusFailure, Code: http.StatusUnprocessableEntity, Reason: metav1.StatusReasonInvalid,
				Message: fmt.Sprintf("%s was changed: %s is not %v", obj.GetName(), path, value),
			}}
		}
	}
	return nil
}

// decoded returns v as decoded from its JSON encoding.
func decoded(v any) (result any, err error) {
	data, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(data, &result)
	}
	return result, err
}

// lookup returns the value at a JSON pointer through objects, or nil if it is absent.
func lookup(value any, pointer string) any {
	for _, token := range strings.Split(pointer, "/")[1:] {
		fields, _ := value.(map[string]any)
		value = fields[strings.NewReplacer("~1", "/", "~0", "~").Replace(token)]
	}
	return value
}
