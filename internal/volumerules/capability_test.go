// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package volumerules

import (
	"errors"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
)

func TestAccessMode(t *testing.T) {
	const (
		rwo, rox, rwx, rwop = corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOncePod
		writer, reader      = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
		writers             = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
		single              = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
		multi               = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	)
	type modes = []corev1.PersistentVolumeAccessMode
	for _, tt := range []struct {
		modes      modes
		want, with csi.VolumeCapability_AccessMode_Mode
		err        error
	}{
		{modes{rwop}, writer, single, nil}, {modes{rwop, rwo}, 0, 0, errExclusiveMode}, {modes{rwo, rwop}, 0, 0, errExclusiveMode},
		{modes{rwx}, writers, writers, nil}, {modes{rwx, rox, rwo}, writers, writers, nil}, {modes{rox, rwo}, 0, 0, errMixedModes},
		{modes{rox}, reader, reader, nil}, {modes{rwo, rwo}, writer, multi, nil},
	} {
		for has, want := range map[bool]csi.VolumeCapability_AccessMode_Mode{false: tt.want, true: tt.with} {
			got, err := AccessMode(tt.modes, has)
			if !errors.Is(err, tt.err) || got != want {
				t.Errorf("%v, SINGLE_NODE_MULTI_WRITER %t: %v, %v", tt.modes, has, got, err)
			}
		}
	}
	for _, m := range []modes{nil, {"Some"}} {
		if _, err := AccessMode(m, false); err == nil || !strings.Contains(err.Error(), "unsupported AccessMode combination") {
			t.Errorf("%v: %v", m, err)
		}
	}
}
