// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/nodecontroller"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// The settings of the node controller. All nodes together are fewer than 20, so that the breaker permits the loss of one.
const (
	missingGrace  = time.Minute
	deleteGrace   = 10 * time.Second
	breakerWindow = 2 * time.Minute
	// finalizerTimeout is the time after which a Node is released in any case.
	finalizerTimeout = 2 * time.Minute
)

// nodeChecker holds what the invariants of the node controller need to know about the past.
type nodeChecker struct {
	reads  map[*replica]map[string]reading // the last ones, by resource and name
	number int                             // of reads
	absent map[string][]absence            // by node
	acted  map[string]time.Time            // the last deletion without an approval, by node
	forced map[string]bool                 // handles of volumes that were removed without the driver
	// kept are the nodes whose owner forbids the cleanup. The last state of a Node with the finalizer decides, before its timeout.
	kept map[string]bool
}

func newNodeChecker() nodeChecker {
	return nodeChecker{
		reads: map[*replica]map[string]reading{}, absent: map[string][]absence{}, acted: map[string]time.Time{}, forced: map[string]bool{},
		kept: map[string]bool{},
	}
}

// reading is a read from the API server.
type reading struct {
	number int
	obj    runtime.Object // nil: there is none
	users  []string       // of a list: the claims that pods use on each node, or the volumes that are attached
	before *reading       // the read before it, which another deletion of the process may go by
}

// absence is a time without a Node and a CSINode.
type absence struct{ from, to time.Time } // to is zero while it lasts

// isOf reports whether a role sent r.
func isOf(role string, r apiserver.Request) bool { return strings.HasSuffix(r.UserAgent, "("+role+")") }

// nodeControllerReads returns a function that records that the node controller receives the result of a read.
func (s *simulation) nodeControllerReads(from *replica, r apiserver.Request, result apiserver.Result) (received func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &s.checker.nodes
	c.number++
	read := reading{number: c.number}
	if r.Resource == cluster.Namespaces {
		r.Namespace = ""
	}
	switch {
	case r.Verb == "get":
		read.obj = result.Object
	case r.Resource == cluster.Pods:
		for _, pod := range cluster.List[*corev1.Pod](s.api, cluster.Pods) {
			if s.cluster.Node(pod.Spec.NodeName) != nil {
				read.users = append(read.users, kube.ClaimsOfPod(pod)[0]+" "+pod.Spec.NodeName)
			}
		}
	case r.Resource == cluster.Attachments:
		for _, va := range cluster.List[*storagev1.VolumeAttachment](s.api, cluster.Attachments) {
			read.users = append(read.users, *va.Spec.Source.PersistentVolumeName)
		}
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if c.reads[from] == nil {
			c.reads[from] = map[string]reading{}
		}
		key := readKey(r.Resource.Resource, r.Namespace, r.Name)
		if last := c.reads[from][key]; last.number < read.number {
			last.before = nil
			read.before = &last
			c.reads[from][key] = read
		}
	}
}

func readKey(resource, namespace, name string) string {
	return resource + " " + nameOf(namespace, name)
}

// nodeControllerDeletes checks a request that deletes, when the node controller sends it.
func (s *simulation) nodeControllerDeletes(from *replica, r apiserver.Request) {
	volume := r.Resource == cluster.Volumes && (r.Verb == "delete" || r.Verb == "patch")
	if !isOf("nodecontroller", r) || !volume && (r.Resource != cluster.Claims || r.Verb != "delete") {
		return
	}
	err := s.leads(from, s.scale.nodeLease())
	if err == nil {
		s.mu.Lock()
		err = s.mayCleanUp(from, r)
		s.mu.Unlock()
	}
	if err != nil {
		s.violated("%s %s of the node controller: %v", from.client, describe(r), err)
	}
}

// releasedNode checks a successful patch of a Node, which was before, if it removes the finalizer while the Node is being deleted.
func (s *simulation) releasedNode(from *replica, before *corev1.Node) {
	finalizer := nodecontroller.NodeFinalizer(s.scale.driver())
	has := func(node *corev1.Node) bool { return node != nil && slices.Contains(node.Finalizers, finalizer) }
	if before == nil || before.DeletionTimestamp == nil || !has(before) || has(s.cluster.Node(before.Name)) {
		return
	}
	err := s.leads(from, s.scale.nodeLease())
	age, kept := time.Since(before.DeletionTimestamp.Time), s.recordOf(before.Name).OptedOut || cluster.OptedOut(before, s.scale.driver())
	if err == nil && age < deleteGrace && !kept {
		err = fmt.Errorf("the deletion was requested %v ago", age)
	}
	if err != nil {
		s.violated("%s removes the finalizer of Node %s, which is being deleted: %v", from.client, before.Name, err)
	}
}

// mayCleanUp returns an error unless r carries the version of the object that the process has read, and all that the process
// has read permits the deletion.
func (s *simulation) mayCleanUp(from *replica, r apiserver.Request) error {
	reads := s.checker.nodes.reads[from]
	target := reads[readKey(r.Resource.Resource, r.Namespace, r.Name)]
	obj, ok := target.obj.(metav1.Object)
	if !ok {
		return errors.New("it was not read")
	}
	p := r.Preconditions()
	if r.Verb == "delete" && (ptr.Deref(p.ResourceVersion, "") != obj.GetResourceVersion() || ptr.Deref(p.UID, "") != obj.GetUID()) ||
		r.Verb == "patch" && !strings.Contains(string(r.Body), strconv.Quote(obj.GetResourceVersion())) {
		return errors.New("the request lacks the version that was read")
	}
	pv, err := s.mayClean(reads, target.number, obj)
	if err != nil {
		return err
	}
	node, key := cluster.NodeOf(pv), kube.Key(obj)
	pods := reads[readKey("pods", cluster.Namespace, "")]
	if r.Resource == cluster.Claims && pods.number < target.number {
		return errors.New("the pods were not read after it")
	}
	for _, use := range pods.users {
		claim, on, _ := strings.Cut(use, " ")
		deleted := reads[readKey("nodes", "", on)] // after the pods were read
		if claim == key && on != node && (deleted.number < pods.number || deleted.obj != nil) {
			return fmt.Errorf("a pod on %s uses it", on)
		}
	}
	live, csi := reads[readKey("nodes", "", node)], reads[readKey("csinodes", "", node)]
	if live.number < target.number || csi.number < target.number {
		return fmt.Errorf("%s was not read after it", node)
	}
	err = s.mayCleanUpAfter(node, live.obj, csi.obj)
	if before := live.before; err != nil && before != nil && before.number > target.number {
		return s.mayCleanUpAfter(node, before.obj, csi.obj)
	}
	return err
}

// mayClean returns the PersistentVolume of obj, a claim or a PersistentVolume that was the read with that number, or an error if
// its owners keep it.
func (s *simulation) mayClean(reads map[string]reading, number int, obj metav1.Object) (*corev1.PersistentVolume, error) {
	pv, isVolume := obj.(*corev1.PersistentVolume)
	if claim, ok := obj.(*corev1.PersistentVolumeClaim); ok {
		read := reads[readKey("persistentvolumes", "", claim.Spec.VolumeName)]
		pv, ok = read.obj.(*corev1.PersistentVolume)
		if !ok || pv.Spec.ClaimRef.UID != claim.UID {
			return nil, errors.New("its volume was not read")
		}
	}
	owners := []metav1.Object{obj, pv}
	for _, key := range []string{readKey("storageclasses", "", pv.Spec.StorageClassName), readKey("namespaces", "", cluster.Namespace)} {
		read := reads[key]
		if read.number < number {
			return nil, fmt.Errorf("%s was not read after it", key)
		}
		if owner, ok := read.obj.(metav1.Object); ok {
			owners = append(owners, owner)
		}
	}
	for _, owner := range owners {
		if cluster.OptedOut(owner, s.scale.driver()) {
			return nil, fmt.Errorf("the owner of %s forbids it", owner.GetName())
		}
	}
	attachments := reads[readKey("volumeattachments", "", "")]
	switch {
	case pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete && !(s.driver == nil && !isVolume):
		return nil, fmt.Errorf("the policy of its volume is %s", pv.Spec.PersistentVolumeReclaimPolicy)
	case isVolume && pv.Status.Phase != corev1.VolumeReleased:
		return nil, fmt.Errorf("it is %s", pv.Status.Phase)
	case isVolume && attachments.number < number:
		return nil, errors.New("the VolumeAttachments were not read after it")
	case isVolume && slices.Contains(attachments.users, pv.Name):
		return nil, errors.New("a VolumeAttachment names it")
	}
	return pv, nil
}

// recordOf returns the record of a lost node, empty if there is none.
func (s *simulation) recordOf(name string) (record nodecleanup.LostNode) {
	if cm := s.cluster.LostNodes(); cm != nil {
		for _, lost := range nodecleanup.ParseLostNodes(cm) {
			if lost.Value == name {
				record = lost
			}
		}
	}
	return record
}

// mayCleanUpAfter returns an error unless a node is lost. node and csiNode are what the process has read.
func (s *simulation) mayCleanUpAfter(name string, node, csiNode runtime.Object) error {
	record, now := s.recordOf(name), time.Now()
	deleting, _ := node.(*corev1.Node)
	finalizer := nodecontroller.NodeFinalizer(s.scale.driver())
	near := func(a absence) bool {
		return a.from.Before(record.Since.Add(time.Second)) && (a.to.IsZero() || a.to.After(record.Since.Add(-missingGrace/2)))
	}
	switch {
	case record.OptedOut:
		return errors.New("the record says that the owner of the node forbids it")
	case deleting != nil && cluster.OptedOut(deleting, s.scale.driver()):
		return fmt.Errorf("the owner of Node %s forbids it", name)
	case deleting == nil && s.checker.nodes.kept[name]:
		return fmt.Errorf("the owner of Node %s forbade it", name)
	case deleting != nil && (deleting.DeletionTimestamp == nil || !slices.Contains(deleting.Finalizers, finalizer)):
		return fmt.Errorf("the Node %s exists", name)
	case deleting != nil && (record.UID != deleting.UID || now.Before(deleting.DeletionTimestamp.Add(deleteGrace))):
		return fmt.Errorf("the deletion of Node %s was requested at %v, and its record is %+v", name, deleting.DeletionTimestamp, record)
	case deleting == nil && csiNode != nil:
		return fmt.Errorf("CSINode %s exists", name)
	case deleting == nil && (record.Since.IsZero() || record.Approved.IsZero() && now.Before(record.Since.Add(missingGrace))):
		return fmt.Errorf("the record of %s is %+v", name, record)
	case deleting == nil && !slices.ContainsFunc(s.checker.nodes.absent[name], near):
		return fmt.Errorf("%s existed at %v", name, record.Since)
	}
	return s.breaks(name, record)
}

// breaks returns an error if the deletion is one for too many nodes.
func (s *simulation) breaks(name string, record nodecleanup.LostNode) error {
	if !record.Approved.IsZero() {
		return nil
	}
	acted := s.checker.nodes.acted
	for _, other := range slices.Sorted(maps.Keys(acted)) {
		at := acted[other]
		if other != name && time.Since(at) < breakerWindow {
			return fmt.Errorf("the cleanup of %s acted %v ago, and the loss of this node is not approved", other, time.Since(at))
		}
	}
	acted[name] = time.Now()
	return nil
}

// forces records that the node controller has removed a PersistentVolume or a LogicalVolume, so that the volume of the driver may remain.
func (s *simulation) forces(r apiserver.Request, result apiserver.Result) {
	if r.Resource == cluster.LogicalVolumes && r.Verb == "patch" { // without its finalizer
		s.mu.Lock()
		defer s.mu.Unlock()
		s.checker.nodes.forced[string(result.Object.(metav1.Object).GetUID())] = true
		s.happensLocked("the node cleanup releases a LogicalVolume")
	}
	if r.Resource != cluster.Volumes || r.Verb != "patch" && r.Verb != "delete" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for handle, pv := range s.checker.volumes {
		if pv.Name == r.Name {
			s.checker.nodes.forced[handle] = true
		}
	}
}

// hasVolumes reports whether a PersistentVolume belongs to a node.
func (s *simulation) hasVolumes(node string) bool {
	return slices.ContainsFunc(cluster.List[*corev1.PersistentVolume](s.api, cluster.Volumes), func(pv *corev1.PersistentVolume) bool {
		return cluster.NodeOf(pv) == node
	})
}

// checkNodes records which nodes are absent.
func (s *simulation) checkNodes() {
	if !s.scale.features.Nodes {
		return
	}
	finalizer := nodecontroller.NodeFinalizer(s.scale.driver())
	for _, name := range s.cluster.Nodes {
		node := s.cluster.Node(name)
		if node != nil && node.DeletionTimestamp == nil { // its record ends
			delete(s.checker.nodes.acted, name)
		}
		if node != nil {
			s.checker.nodes.kept[name] = cluster.OptedOut(node, s.scale.driver()) && slices.Contains(node.Finalizers, finalizer) &&
				(node.DeletionTimestamp == nil || time.Since(node.DeletionTimestamp.Time) < finalizerTimeout)
		}
		if node == nil && s.checker.nodes.kept[name] && s.recordOf(name).Value == "" && !s.hasVolumes(name) {
			s.checker.nodes.kept[name] = false // nothing was left to clean up, and a later volume was never used
		}
		absences := s.checker.nodes.absent[name]
		exists := s.cluster.Node(name) != nil || s.api.Get(cluster.CSINodes, "", name) != nil
		switch last := len(absences) - 1; {
		case exists && last >= 0 && absences[last].to.IsZero():
			absences[last].to = time.Now()
		case !exists && (last < 0 || !absences[last].to.IsZero()):
			s.checker.nodes.absent[name] = append(absences, absence{from: time.Now()})
		}
	}
}
